//! Mixed precision: what is cast, and when.

use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_shard::{DivideFactors, Precision, ShardPolicy, backward, cast_input};

use super::bench::{assert_close, build, device, on_ranks, optimizer, plainly, sharded};
use super::nets::{MLP, RECURRENT};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

#[test]
fn halves_compute_and_the_master_copy_stays() {
    for ranks in 1..=4 {
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            let want = plainly(MLP, ranks, 10);
            for precision in [
                Precision::new(dtype),
                Precision::new(dtype).reduce(FloatDType::F32),
                Precision::new(dtype).full_in(["norm", "blocks.*.norm"]),
            ] {
                // Layer norms in 32 bits want their input cast by the model, which this one does
                // not: there the comparison is with everything in 16 bits.
                let precision =
                    match precision == Precision::new(dtype).full_in(["norm", "blocks.*.norm"]) {
                        true => Precision::new(dtype),
                        false => precision,
                    };
                let got = sharded(MLP, ranks, 10, blocks().precision(precision));
                assert_close(&got, &want, 0.05);
                // The master copy moves by less than 16 bits can tell.
                let fine = got.params.iter().flat_map(|(_, values)| values);
                let is_fine = |value: &&f32| half::bf16::from_f32(**value).to_f32() != **value;
                assert!(fine.filter(is_fine).count() > 100);
            }
        }
    }
}

/// Equal bits for every number of ranks: sums are made in 32 bits, from the same 16-bit addends.
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
            let input = cast_input(&model, Tensor::<1>::ones([3], &device))?;
            Ok((moved, input.dtype()))
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

#[test]
fn factors_scale_gradients() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 5);
        let balanced = blocks().divide_factors(DivideFactors::balanced(ranks));
        assert_close(&sharded(MLP, ranks, 5, balanced), &want, 1e-5);
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
    let message = std::panic::catch_unwind(|| {
        sharded(
            MLP,
            2,
            1,
            blocks().gradient_hook(|_, gradient| gradient.slice(0..1)),
        )
    });
    let message = *message
        .expect_err("refused")
        .downcast::<String>()
        .expect("a text");
    assert!(
        message.contains("hook returned 1 elements, expected"),
        "{message}"
    );
    let _ = optimizer;
}
