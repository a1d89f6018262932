//! Copies between the host and a device with its own memory.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{Check, LaunchConfig, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, Transfers, backward, fully_shard, launch, memory};

use super::bench::{device, ready};
use super::nets::input;

#[derive(Module, Debug)]
struct Chain {
    layers: Vec<Linear>,
}

const NUM_LAYERS: usize = 3;
const FULL: usize = 6 * 6 * 4;

impl Chain {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(6, 6).with_bias(false).init(device);
        Self {
            layers: (0..NUM_LAYERS).map(|_| layer()).collect(),
        }
    }
}

/// Ranks that are threads exchange bytes in the memory of their device. If they compare bytes, they do so on the host:
/// each gather reads this rank's shard and brings the full parameter; each reduction reads a full gradient and brings
/// the shard's. Nothing else is copied, and nothing at all on the CPU.
#[test]
fn every_copy_of_a_step_is_counted() {
    counts_every_copy(&device(), Check::Agreement);
}

#[test]
fn threads_copy_nothing_through_the_host() {
    counts_every_copy(&device(), Check::Calls);
}

#[cfg(feature = "ndarray")]
#[test]
fn threads_copy_nothing_through_the_host_on_another_backend() {
    let device = super::bench::named_device("ndarray");
    let device = device.autodiff().gradient_checkpointing();
    counts_every_copy(&device, Check::Calls);
}

#[cfg(feature = "ndarray")]
#[test]
fn every_copy_of_a_step_on_another_backend_is_counted() {
    let device = super::bench::named_device("ndarray");
    let device = device.autodiff().gradient_checkpointing();
    counts_every_copy(&device, Check::Agreement);
}

fn counts_every_copy(device: &Device, check: Check) {
    let device = device.clone();
    let is_host = device.clone().without_autodiff() == Device::flex();
    let is_direct = is_host || check == Check::Calls;
    let body = move |world: ProcessGroup| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let policy = ShardPolicy::new().units(["layers.*"]);
        let model = fully_shard(ready(|| Chain::new(&device)), &mesh, policy)?;
        let start = memory(&model)?.staged;
        let before = world.counts();
        let x: Tensor<2> = input([2, 6], world.rank(), 0, &device);
        let y = model.layers.iter().fold(x, |x, layer| layer.forward(x));
        backward(y.sum(), &model)?;
        let gathers = world.counts().since(&before);
        let gathers = gathers.of(OperationKind::AllGather).operations as usize;
        let end = memory(&model)?.staged;
        let since = |end: Transfers, start: Transfers| Transfers {
            number: end.number - start.number,
            bytes: end.bytes - start.bytes,
        };
        let expected = |number, bytes| {
            if is_direct {
                Transfers::default()
            } else {
                Transfers { number, bytes }
            }
        };
        let number = gathers + NUM_LAYERS;
        assert_eq!(
            since(end.to_host, start.to_host),
            expected(number, gathers * FULL / 2 + NUM_LAYERS * FULL)
        );
        assert_eq!(
            since(end.to_device, start.to_device),
            expected(number, gathers * FULL + NUM_LAYERS * FULL / 2)
        );
        let text = memory(&model)?.to_string();
        assert_eq!(text.contains("copied to host"), end.to_host.number > 0);
        Ok::<_, Error>(())
    };
    launch(LaunchConfig::new(2).check(check), body).unwrap();
}
