//! Parameters with one owner: their optimizer's state in checkpoints, in files and in Burn's own loop.

use std::path::Path;
use std::time::Duration;

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{
    AdafactorConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer, MuonConfig,
    SgdConfig,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::{local_state, shard_optimizer, unsharded, unsharded_optimizer};
use burn_fsdp::optim::FileBackedOptimizer;
use burn_fsdp::state::into_record;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, Strategy, backward,
    fully_shard, launch, replicate, resume, save,
};

use crate::fixed::Fixed;

type Make = fn() -> ModuleOptimizer;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            layers: (0..3)
                .map(|_| LinearConfig::new(9, 9).init(device))
                .collect(),
            head: LinearConfig::new(9, 5).with_bias(false).init(device),
        }
    }

    fn loss(&self, step: u64, device: &Device) -> Tensor<1> {
        let value = |i: u64| ((i * 7 + step * 5) % 13) as f32 / 13.0 - 0.4;
        let values: Vec<f32> = (0..4 * 9).map(value).collect();
        let mut x = Tensor::<2>::from_data(TensorData::new(values, [4, 9]), device);
        for layer in &self.layers {
            x = layer.forward(x).tanh();
        }
        self.head.forward(x).square().mean()
    }
}

fn muon() -> ModuleOptimizer {
    let matrices = ParamGroup::from_any_predicates(vec!["weight"]);
    let vectors = AdamWConfig::new().init();
    vectors.with_group(matrices, MuonConfig::new().build(), None)
}

const OPTIMIZERS: [(&str, Make); 5] = [
    ("muon", muon),
    ("adafactor", || AdafactorConfig::new().init()),
    ("lamb", || LambConfig::new().init()),
    ("sgd", || SgdConfig::new().init()),
    ("clipping by norm", || {
        let optimizer = AdamWConfig::new().init();
        optimizer.with_grad_clipping(GradientClipping::Norm(1e-3))
    }),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placed {
    /// Every parameter has one owner.
    Owned,
    /// Every rank holds everything.
    Everywhere,
    /// Owned in each of two replicas.
    Hybrid,
    /// Flat shards.
    Cut,
}

fn mesh(world: &ProcessGroup, placed: Placed) -> Result<ProcessMesh, Error> {
    let mesh = match placed {
        Placed::Hybrid => Mesh::new([("replicate", 2), ("shard", world.size() / 2)])?,
        _ => Mesh::line("shard", world.size())?,
    };
    Ok(ProcessMesh::new(world, mesh)?)
}

fn model(mesh: &ProcessMesh, placed: Placed) -> Result<Net, Error> {
    let device = Device::flex().autodiff().gradient_checkpointing();
    // All tests of this process share Burn's generator.
    sharded(Net::new(&device).map(&mut Fixed(0)), mesh, placed)
}

fn sharded(net: Net, mesh: &ProcessMesh, placed: Placed) -> Result<Net, Error> {
    let policy = ShardPolicy::new().units(["layers.*"]);
    Ok(match placed {
        Placed::Owned => fully_shard(net, mesh, policy.one_owner(["**"]))?,
        Placed::Hybrid => {
            let policy = policy.one_owner(["**"]).replicate_axis("replicate");
            fully_shard(net, mesh, policy)?
        }
        Placed::Everywhere => replicate(net, mesh, policy)?,
        Placed::Cut => fully_shard(net, mesh, policy.strategy(Strategy::FullShard))?,
    })
}

/// Whole parameters, by path.
type Params = Vec<(String, Vec<f32>)>;

/// Collective.
fn whole(net: &Net) -> Result<Params, Error> {
    let record = into_record(net.clone())?;
    let net = Net::new(&Device::flex()).load_record(record);
    let floats = |data: TensorData| data.try_to_vec::<f32>().expect("floats");
    let layers = net.layers.into_iter().chain([net.head]);
    let named = layers.enumerate().map(|(index, layer)| {
        let mut values = floats(layer.weight.val().into_data());
        if let Some(bias) = layer.bias {
            values.extend(floats(bias.val().into_data()));
        }
        (format!("layer {index}"), values)
    });
    Ok(named.collect())
}

/// Continues the training in `folder` up to `until` steps, and saves there.
fn train(folder: &Path, ranks: usize, placed: Placed, make: Make, until: u64) -> Vec<Params> {
    let folder = folder.to_owned();
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(30));
    let done = launch(config, move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = mesh(&world, placed)?;
        let resumed = resume(&folder, model(&mesh, placed)?, make(), &mesh)?;
        let (mut net, mut optimizer) = (resumed.model, resumed.optimizer);
        for step in resumed.step..until {
            // The same batch on every rank: a mean of equal gradients has the same bits.
            let gradients = backward(net.loss(step, &device), &net)?;
            net = optimizer.step(1e-2, net, gradients);
        }
        save(&folder, until, &net, &optimizer, &mesh)?;
        whole(&net)
    });
    done.unwrap_or_else(|error| panic!("{error}"))
}

/// A training run stops and continues, on other ranks and with another placement. It ends with the bits of a run that
/// never stopped.
#[test]
fn training_resumes_from_a_checkpoint_with_any_owners() {
    let placements = [
        (1, Placed::Owned),
        (2, Placed::Owned),
        (4, Placed::Owned),
        (4, Placed::Hybrid),
        (2, Placed::Everywhere),
    ];
    for (name, make) in OPTIMIZERS {
        let folder = tempfile::tempdir().expect("a folder");
        let want = train(folder.path(), 1, Placed::Everywhere, make, 6).swap_remove(0);
        for (index, (ranks, placed)) in placements.into_iter().enumerate() {
            let (next_ranks, next_placed) = placements[(index + 1) % placements.len()];
            let folder = tempfile::tempdir().expect("a folder");
            train(folder.path(), ranks, placed, make, 3);
            let got = train(folder.path(), next_ranks, next_placed, make, 6);
            for got in got {
                assert_eq!(
                    got, want,
                    "{name}: {placed:?} on {ranks}, then {next_placed:?} on {next_ranks}"
                );
            }
        }
    }
}

/// The states of element-wise optimizers can be cut, whichever ranks held them.
#[test]
fn elementwise_states_move_between_owners_and_shards() {
    let folder = tempfile::tempdir().expect("a folder");
    let make: Make = || AdamWConfig::new().init();
    let want = train(folder.path(), 1, Placed::Everywhere, make, 6).swap_remove(0);
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), 2, Placed::Owned, make, 2);
    train(folder.path(), 4, Placed::Cut, make, 4);
    for got in train(folder.path(), 2, Placed::Owned, make, 6) {
        assert_eq!(got, want);
    }
}

/// A state whose shape differs from its parameter's has one part, on its owner, and is never cut silently.
#[test]
fn non_elementwise_states_are_rejected_on_shards() {
    let folder = tempfile::tempdir().expect("a folder");
    let make: Make = || AdafactorConfig::new().init();
    train(folder.path(), 2, Placed::Owned, make, 2);
    let step = Checkpoints::new(folder.path()).newest().expect("saved");
    let tensors = step.index().tensors.iter();
    let of_head: Vec<_> = tensors
        .filter(|tensor| tensor.name.starts_with("optimizer.head.weight"))
        .collect();
    assert!(of_head.iter().any(|tensor| tensor.shape != [9, 5]));
    for tensor in of_head {
        step.read(&tensor.name, &Region::whole(&tensor.shape))
            .expect("whole");
    }
    let path = folder.path().to_owned();
    let config = LaunchConfig::new(2).deadline(Duration::from_secs(30));
    let refused = launch(config, move |world| {
        let mesh = mesh(&world, Placed::Cut)?;
        // An optimizer that may work on shards, but does not accept the state.
        let optimizer = AdamWConfig::new().init();
        let resumed = resume(&path, model(&mesh, Placed::Cut)?, optimizer, &mesh);
        Ok::<_, Error>(resumed.expect_err("Adafactor's factors").to_string())
    });
    for message in refused.expect("no rank failed") {
        assert!(message.contains("one_owner"), "{message}");
    }
}

#[test]
fn file_backed_optimizers_support_owners() {
    let config = LaunchConfig::new(2).deadline(Duration::from_secs(30));
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().to_owned();
    let got = launch(config, move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = mesh(&world, Placed::Owned)?;
        let mut net = model(&mesh, Placed::Owned)?;
        let mut optimizer = FileBackedOptimizer::new(muon(), &state, world.rank())?;
        for step in 0..6 {
            let gradients = backward(net.loss(step, &device), &net)?;
            net = optimizer.step(1e-2, net, gradients)?;
        }
        let held = local_state(&net)?;
        let held: usize = held.iter().map(|tensor| tensor.elements.len()).sum();
        Ok::<_, Error>((whole(&net)?, held, optimizer.file_bytes()))
    });
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let plain = tempfile::tempdir().expect("a folder");
    let want = train(plain.path(), 1, Placed::Everywhere, muon, 6).swap_remove(0);
    for (params, held, file_bytes) in got {
        assert_eq!(params, want);
        assert!(held > 0 && file_bytes > 0);
    }
}

/// Its ids are the stand-ins', so the optimizer's state belongs to no parameter.
#[test]
fn a_record_that_was_loaded_too_early_is_refused_by_save() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let refused = launch(LaunchConfig::new(1), move |world| {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let mesh = mesh(&world, Placed::Cut)?;
        let mut net = model(&mesh, Placed::Cut)?;
        let mut optimizer = AdamWConfig::new().init();
        let gradients = backward(net.loss(0, &device), &net)?;
        net = optimizer.step(1e-2, net, gradients);
        let (record, state) = (into_record(net)?, optimizer.to_record());
        // Loaded, and sharded afterwards.
        let net = Net::new(&device).load_record(record);
        let net = fully_shard(net, &mesh, ShardPolicy::new())?;
        let optimizer = AdamWConfig::new().init().load_record(state);
        let refused = save(&path, 1, &net, &optimizer, &mesh).expect_err("nobody trained on it");
        Ok::<_, Error>(refused.to_string())
    });
    let refused = refused.unwrap_or_else(|error| panic!("{error}"));
    assert!(refused[0].contains("shard first"), "{}", refused[0]);
}

/// All ranks of one would be on the axis of the other.
#[test]
fn shards_are_not_replicated_along_their_own_axis() {
    let refused = launch(LaunchConfig::new(2), |world| {
        let mesh = mesh(&world, Placed::Cut)?;
        let net = Net::new(&Device::flex().autodiff());
        let refused = fully_shard(net, &mesh, ShardPolicy::new().replicate_axis("shard"));
        Ok::<_, Error>(refused.expect_err("one axis for both").to_string())
    });
    for message in refused.expect("no rank failed") {
        assert!(message.contains("replicate_axis"), "{message}");
    }
}

fn plain_device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

/// Plain Burn, from a model and an optimizer that may have been trained: the steps from `from` to 6.
fn plainly(
    mut net: Net,
    mut optimizer: ModuleOptimizer,
    from: u64,
    until: u64,
) -> (Net, ModuleOptimizer) {
    let device = net.head.weight.val().device();
    for step in from..until {
        let gradients = net.loss(step, &device).backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    (net, optimizer)
}

fn plain_net() -> Net {
    Net::new(&plain_device()).map(&mut Fixed(0))
}

/// The values of a plain model.
fn values(net: &Net) -> Vec<Vec<f32>> {
    let floats = |data: TensorData| data.try_to_vec::<f32>().expect("floats");
    let layers = net.layers.iter().chain([&net.head]);
    let of = |layer: &Linear| {
        let mut values = floats(layer.weight.val().into_data());
        let bias = layer.bias.as_ref();
        values.extend(
            bias.map(|bias| floats(bias.val().into_data()))
                .unwrap_or_default(),
        );
        values
    };
    layers.map(of).collect()
}

/// The placements for an optimizer: one that needs whole tensors is only on owners.
fn places_of(name: &str) -> Vec<(usize, Placed)> {
    let mut places = vec![
        (1, Placed::Owned),
        (4, Placed::Owned),
        (4, Placed::Hybrid),
        (2, Placed::Everywhere),
    ];
    if matches!(name, "adamw" | "sgd") {
        places.extend([(1, Placed::Cut), (2, Placed::Cut), (4, Placed::Cut)]);
    }
    places
}

fn with_adamw() -> impl Iterator<Item = (&'static str, Make)> {
    let adamw: (_, Make) = ("adamw", || AdamWConfig::new().init());
    OPTIMIZERS.into_iter().chain([adamw])
}

/// The ranks train for three steps. The rank that keeps the whole model and the whole state continues with plain Burn,
/// with the bits of a training run that was never sharded.
#[test]
fn whole_states_continue_training_without_shards() {
    for (name, make) in with_adamw() {
        let want = values(&plainly(plain_net(), make(), 0, 6).0);
        for (ranks, placed) in places_of(name) {
            let keeper = ranks - 1;
            let got = launch(LaunchConfig::new(ranks), move |world| {
                let device = Device::flex().autodiff().gradient_checkpointing();
                let mesh = mesh(&world, placed)?;
                let (mut net, mut optimizer) = (model(&mesh, placed)?, make());
                for step in 0..3 {
                    let gradients = backward(net.loss(step, &device), &net)?;
                    net = optimizer.step(1e-2, net, gradients);
                }
                let keep = world.rank() == keeper;
                let plain = unsharded(&net, keep)?;
                let optimizer = unsharded_optimizer(&net, &optimizer, keep)?;
                Ok::<_, Error>(plain.zip(optimizer).map(|(plain, optimizer)| {
                    let plain = plain.train();
                    values(&plainly(plain, optimizer, 3, 6).0)
                }))
            });
            let got = got.unwrap_or_else(|error| panic!("{name}: {error}"));
            for (rank, got) in got.into_iter().enumerate() {
                let want = (rank == keeper).then_some(&want);
                assert_eq!(got.as_ref(), want, "{name}: {placed:?} on {ranks}");
            }
        }
    }
}

/// Trained for three steps by plain Burn, then sharded with its optimizer.
#[test]
fn whole_states_are_cut_with_the_model() {
    for (name, make) in with_adamw() {
        let want = plainly(plain_net(), make(), 0, 6).0;
        for (ranks, placed) in places_of(name) {
            let got = launch(LaunchConfig::new(ranks), move |world| {
                let device = Device::flex().autodiff().gradient_checkpointing();
                let mesh = mesh(&world, placed)?;
                let (plain, trained) = plainly(plain_net(), make(), 0, 3);
                let mut net = sharded(plain, &mesh, placed)?;
                let mut optimizer = shard_optimizer(&net, &trained)?;
                for step in 3..6 {
                    let gradients = backward(net.loss(step, &device), &net)?;
                    net = optimizer.step(1e-2, net, gradients);
                }
                Ok::<_, Error>(unsharded(&net, true)?.map(|net| values(&net)))
            });
            for got in got.unwrap_or_else(|error| panic!("{name}: {error}")) {
                assert_eq!(
                    got.as_ref(),
                    Some(&values(&want)),
                    "{name}: {placed:?} on {ranks}"
                );
            }
        }
    }
}

#[test]
fn states_of_another_model_are_refused() {
    let refused = launch(LaunchConfig::new(2), |world| {
        let mesh = mesh(&world, Placed::Cut)?;
        let (_, other) = plainly(plain_net(), AdamWConfig::new().init(), 0, 1);
        let (plain, whole) = plainly(plain_net(), AdafactorConfig::new().init(), 0, 1);
        let net = sharded(plain, &mesh, Placed::Cut)?;
        let refused = |optimizer: &ModuleOptimizer| match shard_optimizer(&net, optimizer) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        Ok::<_, Error>([refused(&other), refused(&whole)])
    });
    for [other, whole] in refused.expect("an error is a value here") {
        assert!(
            other.contains("have ids of no parameter of the model"),
            "{other}"
        );
        assert!(whole.contains("it cannot be divided"), "{whole}");
    }
}
