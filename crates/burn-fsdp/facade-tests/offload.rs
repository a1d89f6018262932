//! Trainings whose shards are on the host while another backend computes, stopped and gone on with from checkpoints.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamW, AdamWConfig, AdamWState, GradientsParams, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::inspect::memory;
use burn_fsdp::internals::inspect::Staged;
use burn_fsdp::internals::state::full_state;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessMesh, ShardPolicy, backward, fully_shard, launch, resume,
    save,
};

use crate::fixed::Fixed;

/// The device that computes, which is not the one of the shards.
#[allow(deprecated, reason = "there is no other second backend on the CPU")]
fn elsewhere() -> Device {
    Device::ndarray()
}

fn is_host(device: &Device) -> bool {
    device.clone().without_autodiff() == Device::flex()
}

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(9, 9).init(device);
        let net = Self {
            layers: (0..3).map(|_| layer()).collect(),
            head: LinearConfig::new(9, 5).with_bias(false).init(device),
        };
        net.map(&mut Fixed(0))
    }

    /// Of the rows of a rank.
    fn loss(&self, rank: usize, step: u64, device: &Device) -> Tensor<1> {
        let value = |i: usize| ((i * 7 + rank * 3 + step as usize * 5) % 13) as f32 / 13.0 - 0.4;
        let values: Vec<f32> = (0..4 * 9).map(value).collect();
        let mut x = Tensor::<2>::from_data(TensorData::new(values, [4, 9]), device);
        for layer in &self.layers {
            x = layer.forward(x).tanh();
        }
        self.head.forward(x).square().mean()
    }
}

fn adamw() -> AdamWConfig {
    // A large epsilon: with a small one Adam hides a wrong gradient scale.
    AdamWConfig::new().with_epsilon(1e-2)
}

/// AdamW that notes where everything is that it is given, has kept and keeps.
#[derive(Clone)]
struct Witness {
    adam: AdamW,
    seen: Arc<Mutex<Vec<Device>>>,
}

impl Optimizer for Witness {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let kept = |state: &AdamWState<D>| state.momentum.moment_1.device();
        let given = [tensor.device(), grad.device()];
        let before = state.as_ref().map(kept);
        let (tensor, state) = self.adam.step(lr, tensor, grad, state);
        let after = state.as_ref().map(kept);
        let mut seen = self.seen.lock().expect("no panic");
        seen.extend(given.into_iter().chain(before).chain(after));
        (tensor, state)
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

#[derive(Default)]
struct Places {
    trained: Vec<Device>,
    others: Vec<Device>,
}

impl ModuleVisitor for Places {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if value.is_require_grad() {
            self.trained.push(value.device())
        } else {
            self.others.push(value.device())
        }
    }
}

/// Shards are on the host, and what computes is not.
fn check_places(net: &Net) -> Result<(), Error> {
    let mut places = Places::default();
    net.visit(&mut places);
    assert_eq!((places.trained.len(), places.others.len()), (7, 7));
    assert!(places.trained.iter().all(is_host), "{:?}", places.trained);
    assert!(!places.others.iter().any(is_host), "{:?}", places.others);
    assert!(!is_host(&net.layers[0].weight.val().device()));
    burn_fsdp::internals::state::reset(net)?;
    Ok(())
}

/// Values by path.
type Params = Vec<(String, Vec<f32>)>;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    /// Shards on the host, another backend computes.
    Offloaded,
    /// The same, with the shards in files.
    Files,
    /// All of it there.
    There,
}

/// From what is in `folder` up to `until` steps, and saved there. Each rank's parameters and copies.
fn trained(folder: &Path, ranks: usize, place: Place, until: u64) -> Vec<(Params, Staged)> {
    let folder = folder.to_owned();
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let done = launch(config, move |world| {
        let device = elsewhere().autodiff().gradient_checkpointing();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let policy = ShardPolicy::new().units(["layers.*"]).shard_vectors(true);
        let policy = match place {
            Place::Offloaded => policy.offload_to(Device::flex()),
            Place::Files => {
                let host = policy.offload_to(Device::flex());
                host.in_files(std::env::temp_dir(), ["**"])
            }
            Place::There => policy,
        };
        let model = fully_shard(Net::new(&device), &mesh, policy)?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let optimizer = ModuleOptimizer::from(Witness {
            adam: adamw().build(),
            seen: seen.clone(),
        });
        let resumed = resume(&folder, model, optimizer, &mesh)?;
        let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
        seen.lock().expect("no panic").clear();
        for step in resumed.step..until {
            // The same number of rows regardless of the number of ranks.
            let parts = (world.rank()..12).step_by(world.size());
            let parts = parts.map(|part| net.loss(part, step, &device));
            let loss = parts.reduce(|sum, part| sum + part).expect("a part");
            let loss = loss.div_scalar(12.0 / world.size() as f32);
            let gradients = backward(loss, &net)?;
            net = optimizer.step(1e-2, net, gradients);
            if place != Place::There {
                check_places(&net)?;
            }
        }
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        assert!(seen.len() >= 3 * 7, "{}", seen.len());
        let on_host = seen.iter().filter(|device| is_host(device)).count();
        match place {
            Place::Offloaded | Place::Files => assert_eq!(on_host, seen.len(), "{seen:?}"),
            Place::There => assert_eq!(on_host, 0),
        }
        let staged = memory(&net)?.staged;
        save(&folder, until, &net, &optimizer, &mesh)?;
        let mut params = Params::new();
        full_state(&net, |tensor| {
            let (words, _) = tensor.bytes.as_chunks::<4>();
            let values = words.iter().map(|word| f32::from_ne_bytes(*word));
            params.push((tensor.path.to_owned(), values.collect()));
        })?;
        Ok::<_, Error>((params, staged))
    });
    done.unwrap_or_else(|error| panic!("{error}"))
}

/// Burn alone, on the CPU, with the rows of all ranks.
fn plainly(steps: u64) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut net = Net::new(&device);
    let mut optimizer = adamw().init();
    for step in 0..steps {
        let parts = (0..12).map(|part| net.loss(part, step, &device));
        let loss = parts.reduce(|sum, part| sum + part).expect("a part") / 12.0;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    let floats = |data: TensorData| data.try_to_vec::<f32>().expect("floats");
    let mut values = Vec::new();
    for layer in net.layers.into_iter().chain([net.head]) {
        values.push(floats(layer.weight.val().into_data()));
        if let Some(bias) = layer.bias {
            values.push(floats(bias.val().into_data()));
        }
    }
    values
}

fn assert_close(got: &Params, want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((path, got), want) in got.iter().zip(want) {
        assert_eq!(got.len(), want.len(), "{what}: {path}");
        for (got, want) in got.iter().zip(want) {
            assert!(
                (got - want).abs() < 1e-5,
                "{what}: {path}: {got}, expected {want}"
            );
        }
    }
}

/// In each part of the training shards, gradients and states are on the host, and whole parameters where the module
/// computes; it ends like Burn alone, and may be offloaded in one part and not in the next.
#[test]
fn training_resumes_from_a_checkpoint() {
    let want = plainly(6);
    let parts = [
        vec![(1, Place::Offloaded, 3), (1, Place::Offloaded, 6)],
        vec![(2, Place::Offloaded, 3), (3, Place::Offloaded, 6)],
        vec![(2, Place::Files, 3), (3, Place::Files, 6)],
        vec![
            (4, Place::Offloaded, 2),
            (2, Place::There, 4),
            (3, Place::Offloaded, 6),
        ],
    ];
    for parts in parts {
        let folder = tempfile::tempdir().expect("a folder");
        let mut params = Vec::new();
        for (ranks, place, until) in &parts {
            params = trained(folder.path(), *ranks, *place, *until);
        }
        // Whole parameters are rank 0's to see.
        assert_close(&params[0].0, &want, &format!("{parts:?}"));
    }
}

/// Only the host's memory can be a file.
#[test]
fn shards_of_a_device_do_not_go_to_files() {
    let device = elsewhere().autodiff();
    let policy = ShardPolicy::new().in_files(std::env::temp_dir(), ["layers.*"]);
    let launched = launch(LaunchConfig::new(1), move |world| {
        let refused = fully_shard(Net::new(&device), &world, policy.clone());
        Ok::<_, Error>(refused.map(drop).map_err(|error| error.to_string()))
    });
    let refused = launched.expect("a rank that returns").remove(0);
    let text = refused.expect_err("not on the host");
    for part in ["in_files is set for `", "add `offload_to(Device::flex())`"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Without an offload, threads copy nothing through the host. With it, they copy whole parameters to the device, and
/// each rank's part of the reduced gradients from it.
#[test]
fn offload_copies_weights_and_parts_of_gradients() {
    let copied = |place| {
        let folder = tempfile::tempdir().expect("a folder");
        trained(folder.path(), 2, place, 2).swap_remove(0).1
    };
    let (offloaded, there) = (copied(Place::Offloaded), copied(Place::There));
    assert_eq!(there, Staged::default());
    assert!(offloaded.to_host.bytes > 0, "gradients: {offloaded:?}");
    assert!(
        offloaded.to_host.bytes < offloaded.to_device.bytes,
        "{offloaded:?}"
    );
}
