//! Hooks that reduce gradients instead of the engine, and divisors that change after sharding.

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_collectives::OperationKind;
use burn_fsdp_mesh::Strategy;
use burn_fsdp_shard::{
    Audit, Cut, DivideFactors, Error, FullGradient, PendingTensors, Precision, ShardPolicy,
    UnitReduction, backward, no_sync, units,
};

use super::bench::{
    Case, assert_close, build, device, on_ranks, panic_of, plainly, plainly_stepped, sharded,
    since, stepped,
};
use super::hybrid;
use super::nets::{CONV_NET, MLP, Mlp, RECURRENT};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

type Parts = Result<PendingTensors, Error>;

/// Does the engine's work with the hook's own means.
fn as_the_engine(unit: &UnitReduction) -> Parts {
    unit.reduce_scatter(unit.gradients().iter().map(FullGradient::tensor).collect())
}

/// Computes the mean on every rank; each rank takes its part.
fn by_whole_means(unit: &UnitReduction) -> Parts {
    let gradients = unit.gradients();
    let means = unit
        .average(gradients.iter().map(FullGradient::tensor).collect())?
        .wait()?;
    let own = gradients.iter().zip(means);
    Ok(own.map(|(gradient, mean)| gradient.held_of(mean)).collect())
}

/// Columns that are orthogonal and of length 1, by Gram and Schmidt; zero where they depend on earlier ones.
fn orthogonal(matrix: Tensor<2>) -> Tensor<2> {
    let [_, columns] = matrix.dims();
    let mut done: Vec<Tensor<2>> = Vec::new();
    for column in 0..columns {
        let mut own = matrix
            .clone()
            .slice([0..matrix.dims()[0], column..column + 1]);
        let before = own
            .clone()
            .powf_scalar(2.0)
            .sum()
            .into_scalar::<f32>()
            .sqrt();
        for _ in 0..2 {
            for other in &done {
                let share = other.clone().transpose().matmul(own.clone());
                own = own - other.clone().matmul(share);
            }
        }
        let length = own
            .clone()
            .powf_scalar(2.0)
            .sum()
            .into_scalar::<f32>()
            .sqrt();
        done.push(if length > 1e-4 * before && length > 0.0 {
            own.div_scalar(length)
        } else {
            own.zeros_like()
        });
    }
    Tensor::cat(done, 1)
}

/// PowerSGD (Vogels et al., 2019) of full rank, without memory of its error: the ranks average two thin factors.
fn by_factors(unit: &UnitReduction) -> Parts {
    let mut parts = Vec::new();
    for gradient in unit.gradients() {
        let shape = gradient.shape();
        if shape.len() < 2 {
            let mean = unit.average(vec![gradient.tensor()])?.wait()?.remove(0);
            parts.push(gradient.held_of(mean));
            continue;
        }
        let rows = shape[0];
        let columns = shape[1..].iter().product::<usize>();
        let matrix: Tensor<2> = gradient.tensor().reshape([rows, columns]);
        let rank = rows.min(columns);
        // The same on all ranks, and of full rank.
        let start =
            Tensor::<1, burn::tensor::Int>::arange(0..(columns * rank) as i64, &matrix.device());
        let start = (start.float().powf_scalar(2.0) * 0.37)
            .sin()
            .reshape([columns, rank]);
        let sketch = matrix.clone().matmul(start).reshape([rows * rank]);
        let sketch = unit.average(vec![sketch])?.wait()?.remove(0);
        let left = orthogonal(sketch.reshape([rows, rank]));
        let right = matrix
            .transpose()
            .matmul(left.clone())
            .reshape([columns * rank]);
        let right: Tensor<2> = unit
            .average(vec![right])?
            .wait()?
            .remove(0)
            .reshape([columns, rank]);
        let mean = left.matmul(right.transpose()).reshape([rows * columns]);
        parts.push(gradient.held_of(mean));
    }
    Ok(parts.into())
}

fn hooks_train<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
    for ranks in 1..=4 {
        let want = plainly(case, ranks, 5);
        let policies = [
            policy.clone(),
            policy.clone().cut(Cut::Dims),
            policy.clone().one_owner(["**"]),
            policy.clone().strategy(Strategy::NoShard),
            policy
                .clone()
                .divide_factors(DivideFactors::balanced(ranks)),
            policy.clone().prefetch(2).audit(Audit::EveryStep),
        ];
        for policy in policies {
            let engine = policy.clone().reduction_hook(as_the_engine);
            assert_close(&sharded(case, ranks, 5, engine), &want, 1e-5);
            let means = policy.reduction_hook(by_whole_means);
            assert_close(&sharded(case, ranks, 5, means), &want, 1e-5);
        }
    }
}

#[test]
fn custom_reductions_match_one_rank() {
    hooks_train(MLP, &blocks());
    hooks_train(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
    hooks_train(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
}

#[test]
fn the_engines_reduction_as_a_hook_is_bit_identical() {
    let halves = |reduce| Precision::new(FloatDType::BF16).reduce(reduce);
    let policies = [
        blocks(),
        blocks().precision(halves(FloatDType::BF16)),
        blocks().precision(halves(FloatDType::F32)),
    ];
    for ranks in [1, 2, 3] {
        for policy in &policies {
            let want = sharded(MLP, ranks, 5, policy.clone());
            let got = sharded(MLP, ranks, 5, policy.clone().reduction_hook(as_the_engine));
            assert_eq!(got.params, want.params);
        }
    }
}

/// A hook's own arithmetic, where the engine adds up the replicas' results.
#[test]
fn replicas_share_the_divisor() {
    let own = |unit: &UnitReduction| {
        let gradients = unit.gradients();
        let share = unit.divisor() / unit.group().size() as f64;
        let means = unit
            .average(gradients.iter().map(FullGradient::tensor).collect())?
            .wait()?;
        let means = means.into_iter().map(|mean| mean.mul_scalar(share));
        let parts = gradients.iter().zip(means);
        let parts = parts.map(|(gradient, mean)| gradient.held_of(mean).div_scalar(share));
        Ok(parts.collect())
    };
    for layout in [[1, 2], [2, 2]] {
        let want = plainly(MLP, layout[0] * layout[1], 3);
        let policy = blocks().reduction_hook(own);
        assert_close(&hybrid::trained(MLP, layout, policy, 3), &want, 1e-5);
    }
}

#[test]
fn divisors_stay_while_sums_wait_for_the_replicas() {
    let layout = [2, 1];
    on_ranks(2, move |world| {
        let device = device();
        let model = hybrid::build(MLP, &world, layout, blocks())?;
        let handles = units(&model)?;
        for unit in &handles {
            unit.set_requires_all_reduce(false)?;
        }
        backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
        let factors = DivideFactors {
            pre: 1.0,
            post: 1.0,
        };
        let refused = handles[0]
            .set_divide_factors(factors)
            .expect_err("sums wait");
        assert!(
            refused.to_string().contains("wait on the shards"),
            "{refused}"
        );
        for unit in &handles {
            unit.set_requires_all_reduce(true)?;
        }
        backward((MLP.loss)(&model, world.rank(), 1, &device), &model)?;
        handles[0].set_divide_factors(factors)
    });
}

#[test]
fn low_rank_factors_of_full_rank_are_the_mean() {
    for ranks in [1, 2, 3] {
        let want = plainly_stepped(MLP, ranks);
        for policy in [blocks(), blocks().strategy(Strategy::NoShard)] {
            let policy = policy.reduction_hook(by_factors);
            let got = stepped(MLP, ranks, policy, |model: &Mlp, world, device| {
                backward((MLP.loss)(model, world.rank(), 0, device), model)
            });
            assert_close(&got, &want, 1e-4);
        }
    }
}

#[test]
fn replicas_sum_the_results_of_hooks() {
    for layout in [[2, 1], [2, 2], [1, 3]] {
        let want = plainly(MLP, layout[0] * layout[1], 5);
        for hook in [as_the_engine, by_whole_means] {
            let policy = blocks().reduction_hook(hook);
            assert_close(&hybrid::trained(MLP, layout, policy, 5), &want, 1e-5);
        }
    }
}

#[test]
fn hooks_can_halve_the_traffic() {
    let bytes = |policy: ShardPolicy| {
        let counts = on_ranks(2, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let before = world.counts();
            backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
            Ok(since(&world, &before))
        });
        counts[0].of(OperationKind::ReduceScatter).bytes
    };
    let halves = |unit: &UnitReduction| {
        let gradients = unit.gradients().iter();
        unit.reduce_scatter(gradients.map(|g| g.tensor().cast(DType::BF16)).collect())
    };
    let plain = bytes(blocks());
    assert_eq!(2 * bytes(blocks().reduction_hook(halves)), plain);
    assert_eq!(bytes(blocks().reduction_hook(as_the_engine)), plain);
    assert_eq!(bytes(blocks().reduction_hook(by_whole_means)), 0);
    for ranks in 1..=3 {
        let got = sharded(MLP, ranks, 5, blocks().reduction_hook(halves));
        assert_close(&got, &plainly(MLP, ranks, 5), 2e-2);
    }
}

/// The blocks that this rank runs: no rank runs the last, and only rank 0 runs the second.
pub(crate) fn with_gaps(model: &Mlp, rank: usize, device: &Device) -> Tensor<1> {
    let mut x = model
        .embed
        .forward(super::nets::tokens([2, 4], 11, rank, 0, device));
    x = model.blocks[0].forward(x);
    if rank == 0 {
        x = model.blocks[1].forward(x);
    }
    model
        .head
        .forward(model.norm.forward(x))
        .powf_scalar(2.0)
        .mean()
}

#[test]
fn ranks_without_a_gradient_take_part() {
    for ranks in 1..=3 {
        let by = |policy: ShardPolicy| {
            stepped(MLP, ranks, policy, |model: &Mlp, world, device| {
                backward(with_gaps(model, world.rank(), device), model)
            })
        };
        let want = by(blocks());
        assert_eq!(
            by(blocks().reduction_hook(as_the_engine)).params,
            want.params
        );
        assert_close(&by(blocks().reduction_hook(by_whole_means)), &want, 1e-6);
    }
}

#[test]
fn held_gradients_go_through_the_hook() {
    for ranks in 1..=3 {
        let by = |policy: ShardPolicy| {
            stepped(MLP, ranks, policy, |model: &Mlp, world, device| {
                no_sync(model, || {
                    backward((MLP.loss)(model, world.rank(), 0, device), model)
                })??;
                backward((MLP.loss)(model, world.rank(), 1, device), model)
            })
        };
        assert_eq!(
            by(blocks().reduction_hook(as_the_engine)).params,
            by(blocks()).params
        );
        let wide = |_: &str, gradient: Tensor<1>| gradient.mul_scalar(2.0);
        let both = blocks().gradient_hook(wide);
        assert_eq!(
            by(both.clone().reduction_hook(as_the_engine)).params,
            by(both).params
        );
    }
}

#[test]
fn invalid_hook_results_are_named_in_the_error() {
    let message = |hook: fn(&UnitReduction) -> Parts| {
        panic_of(move || drop(sharded(MLP, 2, 1, blocks().reduction_hook(hook))))
    };
    let short = message(|unit| Ok(as_the_engine(unit)?.map(|parts| parts[1..].to_vec())));
    assert!(short.contains("the policy's hook returned "), "{short}");
    assert!(short.contains(" tensors; give plain tensors"), "{short}");
    let long = message(|unit| Ok(unit.gradients().iter().map(FullGradient::tensor).collect()));
    assert!(long.contains(" elements for `"), "{long}");
    let tracked = message(|unit| {
        let parts = as_the_engine(unit)?.wait()?.into_iter();
        let device = device();
        Ok(parts
            .map(|part| Tensor::from_data(part.into_data(), &device))
            .collect())
    });
    assert!(tracked.contains("a tensor with a graph"), "{tracked}");
    let wrong = message(|unit| unit.reduce_scatter(Vec::new()));
    assert!(
        wrong.contains("passed `reduce_scatter` 0 tensors"),
        "{wrong}"
    );
}

#[test]
fn ranks_with_different_hooks_are_reported() {
    let message = panic_of(|| {
        on_ranks(2, |world| {
            let policy = match world.rank() {
                0 => blocks().reduction_hook(as_the_engine),
                _ => blocks(),
            };
            let device = device();
            let model = build(MLP, &world, &device, policy)?;
            backward((MLP.loss)(&model, world.rank(), 0, &device), &model)
        });
    });
    assert!(message.contains("exchange"), "{message}");
    assert!(message.contains("reduce_scatter"), "{message}");
}

/// The parameters after a step whose units are divided by `factors`, by name.
fn divided(
    ranks: usize,
    policy: ShardPolicy,
    factors: impl Fn(&str) -> Option<DivideFactors> + Send + Sync + Copy + 'static,
) -> Vec<(String, Vec<f32>)> {
    let gradients =
        move |model: &Mlp, world: &burn_fsdp_collectives::ProcessGroup, device: &Device| {
            for unit in units(model)? {
                unit.set_divide_factors(factors(&unit.name()))?;
            }
            backward((MLP.loss)(model, world.rank(), 0, device), model)
        };
    // Steps of plain descent, so that a gradient's scale is seen.
    let outcomes = on_ranks(ranks, move |world| {
        let device = device();
        let model = build(MLP, &world, &device, policy.clone())?;
        let gradients = gradients(&model, &world, &device)?;
        let mut optim = burn::optim::SgdConfig::new().init();
        let model = optim.step(1.0, model, gradients);
        Ok(super::bench::whole_params((MLP.build)(&device), &model))
    });
    outcomes[0].clone()
}

#[test]
fn divisors_change_after_sharding_unit_by_unit() {
    let none = |_: &str| None;
    for ranks in 1..=3 {
        for policy in [
            blocks(),
            blocks().audit(Audit::EveryStep),
            blocks().reduction_hook(as_the_engine),
        ] {
            let mean = divided(ranks, policy.clone(), none);
            let start = plainly(MLP, ranks, 0).params;
            let twice = divided(ranks, policy, move |name| {
                let post = ranks as f64 / 2.0;
                name.starts_with("blocks.1")
                    .then_some(DivideFactors { pre: 1.0, post })
            });
            for ((path, start), ((_, mean), (_, got))) in start.iter().zip(mean.iter().zip(&twice))
            {
                let factor = if path.starts_with("blocks.1") {
                    2.0
                } else {
                    1.0
                };
                for ((start, mean), got) in start.iter().zip(mean).zip(got) {
                    let want = start + factor * (mean - start);
                    assert!((want - got).abs() < 1e-5, "{path}: {got}, expected {want}");
                }
            }
        }
    }
}
