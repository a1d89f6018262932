//! Mixed precision: the casts of parameters, inputs and gradients.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::{OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    DivideFactors, Precision, ShardPolicy, backward, cast_buffers, fully_shard, input_type,
    local_state,
};

use super::bench::{
    Case, Outcome, assert_close, assert_same, build, device, joined, on_ranks, optimizer, panic_of,
    plainly, seeded_by_rank, sharded, train,
};
use super::nets::{CONV_NET, ConvNet, MLP, Mlp, RECURRENT, Recurrent, input, tokens};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Runs `body` in 32 bits, regardless of the types of its input and result.
fn widely<const D: usize>(x: Tensor<D>, body: impl FnOnce(Tensor<D>) -> Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    body(x.cast(DType::F32)).cast(dtype)
}

fn square<const D: usize>(output: Tensor<D>) -> Tensor<1> {
    output.cast(DType::F32).powf_scalar(2.0).mean()
}

/// The residual network as its author writes it for norms in 32 bits.
fn with_wide_norms(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        let y = widely(x.clone(), |x| block.norm.forward(x));
        let y = gelu(block.up.forward(y.clone())) * block.gate.forward(y);
        x = x + block.down.forward(y);
    }
    square(model.head.forward(widely(x, |x| model.norm.forward(x))))
}

/// The same for the convolutions: running states have 32 bits, so BatchNorm must have 32 bits.
fn with_wide_batch_norms(model: &ConvNet, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = input([2, 3, 5, 5], rank, step, device);
    let mut x = x.cast(model.convs[0].weight.val().dtype());
    for (conv, norm) in model.convs.iter().zip(&model.norms) {
        x = relu(widely(conv.forward(x), |x| norm.forward(x)));
    }
    let x: Tensor<2> = x.mean_dim(3).mean_dim(2).reshape([2, 7]);
    square(model.head.forward(x))
}

/// The same for recurrent layers, which collect their outputs in 32 bits. The head is in halves.
fn with_wide_layers(model: &Recurrent, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = input([2, 6, 5], rank, step, device);
    let x = model
        .layers
        .iter()
        .fold(x, |x, layer| layer.forward(x, None).0);
    square(model.head.forward(x.cast(model.head.weight.val().dtype())))
}

const WIDE_NORMS: Case<Mlp> = Case {
    build: Mlp::new,
    loss: with_wide_norms,
};

const WIDE_BATCH_NORMS: Case<ConvNet> = Case {
    build: ConvNet::new,
    loss: with_wide_batch_norms,
};

const WIDE_LAYERS: Case<Recurrent> = Case {
    build: Recurrent::new,
    loss: with_wide_layers,
};

/// The distance of a run in halves from one in full.
#[derive(Debug)]
struct Distance {
    dtype: FloatDType,
    /// Relative to the largest loss.
    losses: f32,
    /// Relative to the largest value of each parameter.
    params: f32,
}

impl Distance {
    fn between(dtype: FloatDType, got: &Outcome, want: &Outcome) -> Self {
        let of = |got: &[f32], want: &[f32]| {
            let scale = want.iter().fold(1e-6f32, |max, value| max.max(value.abs()));
            let far = got.iter().zip(want).map(|(got, want)| (got - want).abs());
            far.fold(0.0, f32::max) / scale
        };
        let params = got.params.iter().zip(&want.params);
        Self {
            dtype,
            losses: of(&got.losses, &want.losses),
            params: params
                .map(|((_, got), (_, want))| of(got, want))
                .fold(0.0, f32::max),
        }
    }
}

/// Compares ten steps in halves with ten in full, with reductions in either.
fn distances<M: Module + 'static>(
    case: Case<M>,
    policy: &ShardPolicy,
    full_in: &[&str],
) -> Vec<Distance> {
    let mut distances = Vec::new();
    for ranks in 1..=4 {
        let want = plainly(case, ranks, 10);
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            let half = Precision::new(dtype).full_in(full_in.iter().copied());
            for precision in [half.clone(), half.reduce(FloatDType::F32)] {
                let got = sharded(case, ranks, 10, policy.clone().precision(precision));
                // The master copy moves by less than 16 bits can represent.
                let fine = got.params.iter().flat_map(|(_, values)| values);
                let is_fine = |value: &&f32| half::bf16::from_f32(**value).to_f32() != **value;
                assert!(fine.filter(is_fine).count() > 100);
                let distance = Distance::between(dtype, &got, &want);
                println!("{ranks} ranks: {distance:?}");
                assert!(distance.losses > 0.0, "it was computed in halves");
                distances.push(distance);
            }
        }
    }
    distances
}

/// Losses and parameters stay within the precision of 8 (bf16) or 11 (f16) bits.
fn halves_track<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy, full_in: &[&str]) {
    for distance in distances(case, policy, full_in) {
        let [losses, params] = match distance.dtype {
            FloatDType::BF16 => [0.02, 0.03],
            _ => [0.002, 0.005],
        };
        assert!(distance.losses <= losses, "{distance:?}");
        assert!(distance.params <= params, "{distance:?}");
    }
}

#[test]
fn halves_compute_and_the_master_copy_stays() {
    halves_track(MLP, &blocks(), &[]);
}

#[test]
fn layer_norms_stay_in_full_where_the_model_casts() {
    halves_track(WIDE_NORMS, &blocks(), &["norm", "blocks.*.norm"]);
}

#[test]
fn recurrent_layers_can_compute_in_full_with_a_head_in_halves() {
    let layers = ShardPolicy::new().units(["layers.*"]);
    halves_track(WIDE_LAYERS, &layers, &["layers.*"]);
}

/// After a BatchNorm of so few values the weights of a convolution hardly matter, and Adam moves them by the
/// signs of noise, so only losses are compared.
#[test]
fn batch_norms_stay_in_full_where_the_model_casts() {
    let convs = ShardPolicy::new().units(["convs.*"]);
    for distance in distances(WIDE_BATCH_NORMS, &convs, &["norms.*"]) {
        assert!(distance.losses <= 0.02, "{distance:?}");
    }
}

/// Layers with states compute in full without a pattern, like those that a pattern names.
#[test]
fn stateful_layers_stay_in_full_by_their_kind() {
    fn agrees<M: Module + 'static>(case: Case<M>, units: &str, layers: &str) {
        for ranks in 1..=3 {
            for dtype in [FloatDType::BF16, FloatDType::F16] {
                let policy = ShardPolicy::new().units([units]);
                let half = Precision::new(dtype).reduce(FloatDType::F32);
                let by_kind = policy.clone().precision(half.clone());
                let got = sharded(case, ranks, 5, by_kind.stateful_layers_in_full());
                let by_name = policy.precision(half.full_in([layers]));
                let want = sharded(case, ranks, 5, by_name);
                assert_same(
                    &got,
                    &want,
                    &format!("{layers} in {dtype:?} on {ranks} ranks"),
                );
            }
        }
    }
    agrees(WIDE_BATCH_NORMS, "convs.*", "norms.*");
    agrees(WIDE_LAYERS, "layers.*", "layers.*");
}

/// The convolutions as their author writes them: in one type, that of the first weight.
fn in_one_type(model: &ConvNet, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let x = input([2, 3, 5, 5], rank, step, device);
    let mut x = x.cast(model.convs[0].weight.val().dtype());
    for (conv, norm) in model.convs.iter().zip(&model.norms) {
        x = relu(norm.forward(conv.forward(x)));
    }
    let x: Tensor<2> = x.mean_dim(3).mean_dim(2).reshape([2, 7]);
    square(model.head.forward(x))
}

const ONE_TYPE: Case<ConvNet> = Case {
    build: ConvNet::new,
    loss: in_one_type,
};

/// BatchNorm computes in 16 bits where its running states are of these, and is rejected where they are not.
#[test]
fn running_states_may_be_of_the_compute_type() {
    let policy = ShardPolicy::new().units(["convs.*"]);
    let policy = policy.precision(Precision::new(FloatDType::BF16));
    for ranks in [1, 3] {
        let own = policy.clone();
        let outcomes = on_ranks(ranks, move |world| {
            let device = device();
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
            let model = seeded_by_rank(ConvNet::new(&device), world.rank());
            let model = fully_shard(cast_buffers(model, FloatDType::BF16)?, &mesh, own.clone())?;
            // A clone of the state alone: it shares its value with the module's.
            let state = model.norms[0].running_mean.clone();
            let before = state.value();
            let trained = train(model, ONE_TYPE, world.rank(), 10, &device)?;
            let after = state.value_sync();
            assert_eq!(after.dtype(), DType::BF16);
            let moved = (after.inner() - before.inner()).abs().sum();
            assert!(moved.into_scalar::<f32>() > 0.0);
            Ok(trained)
        });
        let want = plainly(ONE_TYPE, ranks, 10);
        let distance = Distance::between(FloatDType::BF16, &joined(&outcomes), &want);
        assert!(distance.losses > 0.0, "it was computed in halves");
        assert!(distance.losses <= 0.02, "{distance:?}");
        let refused = panic_of(|| sharded(ONE_TYPE, ranks, 1, policy.clone()));
        assert!(refused.contains("BatchNorm"), "{refused}");
    }
}

/// Burn's `LayerNorm` widens what comes in f16 by itself; nothing else takes two types.
#[test]
fn norms_in_full_of_a_model_that_does_not_cast() {
    let full_in = |dtype| blocks().precision(Precision::new(dtype).full_in(["blocks.*.norm"]));
    let want = plainly(MLP, 2, 10);
    let got = sharded(MLP, 2, 10, full_in(FloatDType::F16));
    let distance = Distance::between(FloatDType::F16, &got, &want);
    assert!(
        distance.losses <= 0.002 && distance.params <= 0.005,
        "{distance:?}"
    );
    let message = panic_of(|| sharded(MLP, 2, 1, full_in(FloatDType::BF16)));
    assert!(message.contains("dtype mismatch"), "{message}");
}

/// What no reduction brings back to shards of 32 bits.
#[test]
fn unsupported_types_are_rejected_by_path() {
    for precision in [
        Precision::new(FloatDType::F64),
        Precision::new(FloatDType::Flex32),
        Precision::new(FloatDType::BF16).reduce(FloatDType::F64),
        Precision::default().reduce(FloatDType::Flex32),
    ] {
        let message = panic_of(|| sharded(MLP, 2, 1, blocks().precision(precision.clone())));
        for part in ["`Precision`", "embed.weight", "F32", "f32, bf16 or f16"] {
            assert!(message.contains(part), "{message}");
        }
    }
}

/// The types that a model sees, that optimizers see, and that a checkpoint holds.
#[test]
fn patterns_select_what_computes_in_full() {
    on_ranks(3, |world| {
        let device = device();
        let precision = Precision::new(FloatDType::BF16).full_in(["norm", "*.*.norm"]);
        let model = build(WIDE_NORMS, &world, &device, blocks().precision(precision))?;
        assert_eq!(model.blocks[1].norm.gamma.val().dtype(), DType::F32);
        assert_eq!(model.norm.gamma.val().dtype(), DType::F32);
        assert_eq!(model.blocks[1].up.weight.val().dtype(), DType::BF16);
        assert_eq!(model.embed.weight.val().dtype(), DType::BF16);
        burn_fsdp_shard::reset(&model)?;
        let gradients = backward(with_wide_norms(&model, world.rank(), 0, &device), &model)?;
        let types = gradient_types(&model, &gradients);
        assert!(types.iter().all(|dtype| *dtype == DType::F32), "{types:?}");
        let model = optimizer().step(1e-2, model, gradients);
        for tensor in local_state(&model)? {
            assert_eq!(tensor.dtype, DType::F32, "{}", tensor.path);
        }
        Ok(())
    });
}

/// Without a separate compute type, only the traffic of gradients shrinks.
#[test]
fn gradients_can_be_reduced_in_a_narrower_type() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 10);
        let narrow = blocks().precision(Precision::default().reduce(FloatDType::BF16));
        assert_close(&sharded(MLP, ranks, 10, narrow), &want, 0.02);
    }
    let traffic = |precision: Precision| {
        let moved = on_ranks(2, move |world| {
            let device = device();
            let policy = blocks().precision(precision.clone());
            let model = build(MLP, &world, &device, policy)?;
            let before = world.counts();
            backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
            Ok(world.counts().since(&before))
        });
        let bytes = |kind| moved[0].of(kind).bytes;
        (
            bytes(OperationKind::AllGather),
            bytes(OperationKind::ReduceScatter),
        )
    };
    let full = traffic(Precision::default());
    let narrow = traffic(Precision::default().reduce(FloatDType::BF16));
    assert_eq!(narrow, (full.0, full.1 / 2));
}

#[test]
fn shards_and_gradients_are_of_the_stored_type_and_traffic_halves() {
    let bytes = |policy: ShardPolicy| {
        let seen = on_ranks(2, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let mut moved = world.counts();
            for step in 0..3 {
                let before = world.counts();
                let loss = (MLP.loss)(&model, world.rank(), step, &device);
                let gradients: GradientsParams = backward(loss, &model)?;
                let dtypes = gradient_types(&model, &gradients);
                assert!(
                    dtypes.iter().all(|dtype| *dtype == DType::F32),
                    "{dtypes:?}"
                );
                moved = world.counts().since(&before);
            }
            Ok((moved, input_type(&model)?))
        });
        let (moved, dtype) = seen[0];
        (
            moved.of(OperationKind::AllGather).bytes,
            moved.of(OperationKind::ReduceScatter).bytes,
            dtype,
        )
    };
    let full = bytes(blocks());
    let half = bytes(blocks().precision(Precision::new(FloatDType::BF16)));
    let wide = bytes(blocks().precision(Precision::new(FloatDType::BF16).reduce(FloatDType::F32)));
    assert_eq!((full.0, full.2), (2 * half.0, DType::F32));
    assert_eq!((full.1, half.2), (2 * half.1, DType::BF16));
    assert_eq!((wide.0, wide.1), (half.0, full.1));
}

fn gradient_types<M: burn::module::Module>(model: &M, gradients: &GradientsParams) -> Vec<DType> {
    struct Types<'a>(&'a GradientsParams, Vec<DType>);
    impl burn::module::ModuleVisitor for Types<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
            self.1
                .extend(self.0.get::<D>(param.id).map(|gradient| gradient.dtype()));
        }
    }
    let mut types = Types(gradients, Vec::new());
    model.visit(&mut types);
    assert!(!types.1.is_empty());
    types.1
}

/// Results agree for any factors whose product is the number of ranks, and for a hook that changes nothing,
/// or makes a change that the factors undo.
fn hooks_and_factors_agree<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
    for ranks in 1..=4 {
        let want = plainly(case, ranks, 10);
        let all = ranks as f64;
        let by = |pre, post| policy.clone().divide_factors(DivideFactors { pre, post });
        let doubled = |_: &str, gradient: Tensor<1>| gradient.mul_scalar(2.0);
        for policy in [
            policy
                .clone()
                .divide_factors(DivideFactors::balanced(ranks)),
            by(all, 1.0),
            by(1.0, all),
            policy.clone().gradient_hook(|_, gradient| gradient),
            by(2.0, all).gradient_hook(doubled),
        ] {
            assert_close(&sharded(case, ranks, 10, policy), &want, 1e-5);
        }
    }
}

#[test]
fn hooks_and_factors_agree_on_every_net() {
    hooks_and_factors_agree(MLP, &blocks());
    hooks_and_factors_agree(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
    hooks_and_factors_agree(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
}

#[test]
fn factors_scale_gradients() {
    for ranks in 1..=4 {
        let sum = blocks().divide_factors(DivideFactors {
            pre: 1.0,
            post: 1.0,
        });
        let got = on_ranks(ranks, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, sum.clone())?;
            let mean = build(MLP, &world, &device, blocks())?;
            let norm = |model: &super::nets::Mlp| -> Result<f32, burn_fsdp_shard::Error> {
                let loss = (MLP.loss)(model, world.rank(), 0, &device);
                let gradients = backward(loss, model)?;
                let mut sum = Sum(&gradients, 0.0);
                burn::module::Module::visit(model, &mut sum);
                Ok(sum.1)
            };
            Ok((norm(&model)?, norm(&mean)?))
        });
        for (sum, mean) in got {
            assert!(
                (sum - ranks as f32 * mean).abs() <= 1e-4 * sum.abs(),
                "{sum} {mean}"
            );
        }
    }
}

struct Sum<'a>(&'a GradientsParams, f32);

impl burn::module::ModuleVisitor for Sum<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        if let Some(gradient) = self.0.get::<D>(param.id) {
            self.1 += gradient.abs().sum().into_scalar::<f32>();
        }
    }
}

#[test]
fn a_hook_sees_every_gradient_and_may_change_it() {
    for ranks in [1, 3] {
        let want = plainly(RECURRENT, ranks, 5);
        let policy = ShardPolicy::new().units(["layers.*"]);
        let identity = policy.clone().gradient_hook(|_, gradient| gradient);
        assert_close(&sharded(RECURRENT, ranks, 5, identity), &want, 1e-5);
        let zero = policy.gradient_hook(|_, gradient| gradient.mul_scalar(0.0));
        let got = sharded(RECURRENT, ranks, 1, zero);
        let start = plainly(RECURRENT, ranks, 0);
        for ((path, got), (_, start)) in got.params.iter().zip(&start.params) {
            // Only weight decay is left.
            for (got, start) in got.iter().zip(start) {
                assert!((got - start * (1.0 - 1e-4)).abs() < 1e-6, "{path}");
            }
        }
    }
    let message = panic_of(|| {
        sharded(
            MLP,
            2,
            1,
            blocks().gradient_hook(|_, gradient| gradient.slice(0..1)),
        )
    });
    assert!(
        message.contains("hook returned 1 elements, expected"),
        "{message}"
    );
}
