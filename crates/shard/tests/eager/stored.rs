//! Modules that are built in another type than 32 bits: the type in which shards are stored.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, ShardPolicy, backward, fully_shard, local_state, memory};

use super::bench::{
    Case, Outcome, SEED, assert_close, device, joined, on_ranks, optimizer, plainly, seed_turn,
    whole_params,
};
use super::nets::input;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.0;
        param.map(|tensor| tensor.detach().cast(dtype).require_grad())
    }
}

fn built(device: &Device, dtype: FloatDType) -> Net {
    let linear = |(from, to)| LinearConfig::new(from, to).init(device);
    let net = Net {
        layers: [(5, 7), (7, 7), (7, 3)].map(linear).to_vec(),
    };
    net.map(&mut Cast(dtype))
}

fn loss(net: &Net, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let dtype = net.layers[0].weight.val().dtype();
    let x: Tensor<2> = input([4, 5], rank, step, device);
    let layers = net.layers.iter();
    let y = layers.fold(x.cast(dtype), |x, layer| layer.forward(x).tanh());
    y.cast(DType::F32).powf_scalar(2.0).mean()
}

const DOUBLE: Case<Net> = Case {
    build: |device| built(device, FloatDType::F64),
    loss,
};

const HALF: Case<Net> = Case {
    build: |device| built(device, FloatDType::F16),
    loss,
};

const BRAIN: Case<Net> = Case {
    build: |device| built(device, FloatDType::BF16),
    loss,
};

/// The sharded module, from the seed of the plain one. Casting draws the values at once, on every rank.
fn sharded_net(case: Case<Net>, world: &ProcessGroup, device: &Device) -> Result<Net, Error> {
    let mesh = ProcessMesh::new(world, Mesh::line("shard", world.size())?)?;
    let net = {
        let _turn = seed_turn();
        device.seed(SEED);
        (case.build)(device)
    };
    fully_shard(net, &mesh, ShardPolicy::new().units(["layers.*"]))
}

fn trained(case: Case<Net>, ranks: usize, steps: usize) -> Outcome {
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let mut model = sharded_net(case, &world, &device)?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..steps {
            let loss = (case.loss)(&model, world.rank(), step, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let plain = {
            let _turn = seed_turn();
            (case.build)(&device)
        };
        let params = whole_params(plain, &model);
        Ok(Outcome { losses, params })
    });
    joined(&outcomes)
}

/// The oracle is the same module in the same type on one rank: what differs is the order in which
/// gradients are rounded and added.
#[test]
fn modules_of_other_types_train_as_on_one_rank() {
    for (case, tolerance) in [(DOUBLE, 1e-6), (HALF, 4e-3), (BRAIN, 3e-2)] {
        for ranks in 1..=3 {
            let got = trained(case, ranks, 5);
            assert_close(&got, &plainly(case, ranks, 5), tolerance);
        }
    }
}

#[test]
fn shards_are_stored_in_the_type_of_the_module() {
    for (case, bytes) in [(DOUBLE, 8), (HALF, 2), (BRAIN, 2)] {
        on_ranks(2, move |world| {
            let model = sharded_net(case, &world, &device())?;
            for tensor in local_state(&model)? {
                assert_eq!(tensor.dtype.size(), bytes, "{}", tensor.path);
            }
            let stored: usize = memory(&model)?.parameters;
            let sharded = 5 * 7 + 7 * 7 + 7 * 3;
            let whole = 7 + 7 + 3;
            let share = (sharded / 2 + whole) * bytes;
            assert!(
                stored.abs_diff(share) <= 2 * bytes,
                "{stored} bytes, {share}"
            );
            Ok(())
        });
    }
}
