//! Calls of wrapped modules: the types of inputs and results.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{Error, FullyShardedDataParallel, Precision, ShardPolicy, fully_shard};

use super::bench::{
    Case, Outcome, assert_same, device, joined, on_ranks, optimizer, params, plain_device, plainly,
    seeded_by_rank,
};
use super::nets::input;

/// Burn's layers without casts.
#[derive(Module, Debug)]
struct Net {
    up: Linear,
    norm: BatchNorm,
    down: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            up: LinearConfig::new(5, 7).init(device),
            norm: BatchNormConfig::new(7).init(device),
            down: LinearConfig::new(7, 3).init(device),
        }
    }

    fn square(&self, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let x = input([6, 5], rank, step, device);
        let x = self.norm.forward(relu(self.up.forward(x)));
        self.down.forward(x).powf_scalar(2.0).mean()
    }
}

const NET: Case<Net> = Case {
    build: Net::new,
    loss: Net::square,
};

/// The same net, whose norm is wrapped.
#[derive(Module, Debug)]
struct Wrapping {
    up: Linear,
    norm: FullyShardedDataParallel<BatchNorm>,
    down: Linear,
}

impl Wrapping {
    fn new(net: Net, mesh: &ProcessMesh, dtype: FloatDType) -> Result<Self, Error> {
        let norm = FullyShardedDataParallel::new(net.norm, mesh, ShardPolicy::new())?;
        Ok(Self {
            up: net.up,
            norm: norm.output_type(dtype),
            down: net.down,
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.up.forward(x));
        assert_ne!(x.dtype(), DType::F32);
        let x = self.norm.call(x, |norm, x| {
            assert_eq!(x.dtype(), DType::F32);
            norm.forward(x)
        });
        self.down.forward(x)
    }
}

/// The net with casts in the model.
fn by_hand(net: &Net, x: Tensor<2>, dtype: DType) -> Tensor<2> {
    let x = relu(net.up.forward(x.cast(dtype)));
    let x = net.norm.forward(x.cast(DType::F32)).cast(dtype);
    net.down.forward(x).cast(DType::F32)
}

fn mesh(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

/// Trains five steps, and evaluates.
fn trained<M: Module + 'static>(
    world: &ProcessGroup,
    mut model: M,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) -> Result<Outcome, Error> {
    let device = device();
    let mut optim = optimizer();
    let mut losses = Vec::new();
    let loss = |model: &M, step, device: &Device| {
        let output = forward(model, input([6, 5], world.rank(), step, device));
        output.powf_scalar(2.0).mean()
    };
    for step in 0..5 {
        let loss = loss(&model, step, &device);
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = burn_fsdp_shard::backward(loss, &model)?;
        model = optim.step(1e-2, model, gradients);
    }
    // The running states of a rank are its own.
    let evaluated = loss(&model.valid(), 5, &plain_device());
    assert!(evaluated.into_scalar::<f32>().is_finite());
    let params = params(&Net::new(&device).load_record(model.into_record()));
    let is_state = |path: &str| path.contains("running");
    let params = params.into_iter().filter(|(path, _)| !is_state(path));
    Ok(Outcome {
        losses,
        params: params.collect(),
    })
}

/// A wrapped model computes in 16 bits without casts in its code: its wrapper casts its inputs and results, and the
/// wrapper of a layer those of the layer.
#[test]
fn wrappers_cast_inputs_and_results() {
    for ranks in 1..=3 {
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            let got = on_ranks(ranks, move |world| {
                let mesh = mesh(&world)?;
                let net = seeded_by_rank(Net::new(&device()), world.rank());
                let policy = ShardPolicy::new().precision(Precision::new(dtype));
                let net = Wrapping::new(net, &mesh, dtype)?;
                let model = FullyShardedDataParallel::new(net, &mesh, policy)?;
                let model = model.output_type(FloatDType::F32);
                trained(&world, model, |model, x| {
                    let output = model.call(x, Wrapping::forward);
                    assert_eq!(output.dtype(), DType::F32);
                    output
                })
            });
            let want = on_ranks(ranks, move |world| {
                let net = seeded_by_rank(Net::new(&device()), world.rank());
                let precision = Precision::new(dtype).full_in(["norm"]);
                // The inner wrapper is a unit.
                let policy = ShardPolicy::new().units(["norm"]).precision(precision);
                let model = fully_shard(net, &mesh(&world)?, policy)?;
                trained(&world, model, |net, x| by_hand(net, x, dtype.into()))
            });
            let (got, want) = (joined(&got), joined(&want));
            assert_same(&got, &want, &format!("{dtype:?} on {ranks} ranks"));
            let plain = plainly(NET, 1, 1);
            if ranks == 1 {
                let far = (got.losses[0] - plain.losses[0]).abs() / plain.losses[0];
                assert!(far > 0.0 && far < 0.02, "{far}");
            }
        }
    }
}

/// Without a precision, a wrapper casts to the type in which its module is stored, and nothing else changes.
#[test]
fn calls_keep_integers_and_types_that_fit() {
    let device = device();
    let layer: Linear = LinearConfig::new(4, 2).init(&device);
    let solo = ProcessGroup::solo();
    let layer = FullyShardedDataParallel::new(layer, &solo, ShardPolicy::new()).expect("shards");
    let x = Tensor::<2>::ones([3, 4], &device);
    let labels = Tensor::<1, Int>::zeros([3], &device);
    let half = x.clone().cast(DType::BF16);
    let integers = labels.dtype();
    let output = layer.call((half, labels, x.clone()), |layer, (half, labels, x)| {
        let types = [half.dtype(), x.dtype(), labels.dtype()];
        assert_eq!(types, [DType::F32, DType::F32, integers]);
        (layer.forward(half), labels)
    });
    assert_eq!(output.0.dtype(), DType::F32);
    let half = layer.output_type(FloatDType::BF16).call(x, Linear::forward);
    assert_eq!(half.dtype(), DType::BF16);
}
