//! The sum over replicas, and the reduction of parameters kept whole, by the policy's hook instead of the engine.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fsdp_collectives::{OperationCounts, OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::{Mesh, Strategy};
use burn_fsdp_shard::{
    Audit, DivideFactors, Error, FullGradient, PendingTensors, Precision, ReductionStage,
    ShardPolicy, UnitReduction, backward, fully_shard, no_sync, units,
};

use super::bench::{
    Case, Outcome, assert_close, build, device, joined, on_ranks, optimizer, panic_of, plainly,
    seeded_by_rank, sharded, stepped, whole_params,
};
use super::hybrid;
use super::nets::{CONV_NET, MLP, Mlp, RECURRENT};
use super::reduction_hook::with_gaps;

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

type Parts = Result<PendingTensors, Error>;

/// Does the engine's work with the hook's own means.
fn as_the_engine(unit: &UnitReduction) -> Parts {
    unit.average(unit.gradients().iter().map(FullGradient::tensor).collect())
}

/// The same with the face of the other stages.
fn by_parts(unit: &UnitReduction) -> Parts {
    let gradients = unit.gradients();
    let parts = unit
        .reduce_scatter(gradients.iter().map(FullGradient::tensor).collect())?
        .wait()?;
    let own = gradients.iter().zip(parts);
    Ok(own.map(|(gradient, part)| gradient.held_of(part)).collect())
}

fn in_halves(unit: &UnitReduction) -> Parts {
    let gradients = unit.gradients().iter();
    unit.average(gradients.map(|g| g.tensor().cast(DType::BF16)).collect())
}

fn hooks_train<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy, layouts: &[[usize; 2]]) {
    for &layout in layouts {
        let want = plainly(case, layout[0] * layout[1], 5);
        let policies = [
            policy.clone(),
            policy.clone().whole_below(80),
            policy.clone().one_owner(["**"]),
            policy.clone().prefetch(2).audit(Audit::EveryStep),
            policy
                .clone()
                .divide_factors(DivideFactors::balanced(layout[0] * layout[1])),
        ];
        for policy in policies {
            let engine = hybrid::trained(case, layout, policy.clone(), 5);
            assert_close(&engine, &want, 1e-5);
            for hook in [as_the_engine, by_parts] {
                let hooked = policy.clone().all_reduce_hook(hook);
                let got = hybrid::trained(case, layout, hooked.clone(), 5);
                assert_eq!(got.params, engine.params, "the same bits");
                let both = hooked.reduction_hook(by_parts_of_shards);
                let got = hybrid::trained(case, layout, both, 5);
                assert_eq!(got.params, engine.params, "the same bits");
            }
        }
    }
}

fn by_parts_of_shards(unit: &UnitReduction) -> Parts {
    assert_eq!(unit.stage(), ReductionStage::Shards);
    unit.reduce_scatter(unit.gradients().iter().map(FullGradient::tensor).collect())
}

#[test]
fn all_reduces_by_hooks_are_bit_identical() {
    let layouts = [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2]];
    hooks_train(MLP, &blocks(), &layouts);
    hooks_train(CONV_NET, &ShardPolicy::new().units(["convs.*"]), &[[2, 2]]);
    hooks_train(
        RECURRENT,
        &ShardPolicy::new().units(["layers.*"]),
        &[[3, 1]],
    );
    for reduce in [FloatDType::BF16, FloatDType::F32] {
        let halves = Precision::new(FloatDType::BF16).reduce(reduce);
        let policy = blocks().precision(halves);
        let want = hybrid::trained(MLP, [2, 2], policy.clone(), 5);
        let got = hybrid::trained(MLP, [2, 2], policy.all_reduce_hook(as_the_engine), 5);
        assert_eq!(got.params, want.params);
    }
}

#[test]
fn without_replicas_the_hook_reduces_what_is_kept_whole() {
    for ranks in 1..=4 {
        let want = plainly(MLP, ranks, 5);
        for policy in [
            blocks(),
            blocks().whole_below(80),
            blocks().whole_below(1000),
        ] {
            let engine = sharded(MLP, ranks, 5, policy.clone());
            assert_close(&engine, &want, 1e-5);
            let got = sharded(MLP, ranks, 5, policy.clone().all_reduce_hook(as_the_engine));
            assert_eq!(got.params, engine.params);
            let halves = sharded(MLP, ranks, 5, policy.all_reduce_hook(in_halves));
            assert_close(&halves, &want, 2e-2);
        }
    }
}

/// The counts of the third step on the shard axis, on the replicate axis and over all ranks, for 2 x 2 ranks.
fn traffic(policy: ShardPolicy) -> Vec<OperationCounts> {
    let seen = on_ranks(4, move |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let policy = policy.clone().replicate_axis("replicate");
        let model = fully_shard((MLP.build)(&device), &mesh, policy)?;
        let groups = [mesh.along("shard")?, mesh.along("replicate")?, &world];
        let mut before = groups.map(ProcessGroup::counts);
        for step in 0..3 {
            before = groups.map(ProcessGroup::counts);
            backward((MLP.loss)(&model, world.rank(), step, &device), &model)?;
        }
        let counts = groups.iter().zip(&before);
        let counts = counts.map(|(group, before)| group.counts().since(before));
        Ok(counts.collect::<Vec<_>>())
    });
    seen[0].clone()
}

#[test]
fn a_hook_adds_one_exchange_and_can_halve_the_traffic() {
    let engine = traffic(blocks());
    let bytes = |counts: &OperationCounts| counts.of(OperationKind::AllReduce).bytes;
    for (hook, factor) in [(as_the_engine as fn(&_) -> Parts, 1), (in_halves, 2)] {
        let got = traffic(blocks().all_reduce_hook(hook));
        assert_eq!(got[0].total().operations, engine[0].total().operations);
        // One for each unit over the replicas, and one for all parameters kept whole.
        for (group, units) in [(1, 4), (2, 1)] {
            let operations = |kind| got[group].of(kind).operations;
            assert_eq!(operations(OperationKind::Exchange), units);
            assert_eq!(operations(OperationKind::AllReduce), units);
            assert_eq!(got[group].total().operations, 2 * units);
            assert_eq!(engine[group].total().operations, units);
            assert_eq!(factor * bytes(&got[group]), bytes(&engine[group]));
        }
    }
}

/// The calls of the hook in one step on 2 x 2 ranks: stage, unit, size of the group, divisor, and elements of each
/// gradient and of its part.
type Call = (ReductionStage, String, usize, f64, Vec<(usize, usize)>);

fn calls(policy: ShardPolicy, changes: fn(&Mlp) -> Result<(), Error>) -> Vec<Call> {
    let seen = on_ranks(4, move |world| {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = calls.clone();
        let policy = policy.clone().all_reduce_hook(move |unit| {
            let lengths = unit.gradients().iter();
            let lengths = lengths.map(|own| (own.tensor().dims()[0], own.held().len()));
            let call = (
                unit.stage(),
                unit.unit().to_owned(),
                unit.group().size(),
                unit.divisor(),
                lengths.collect(),
            );
            seen.lock().expect("no panic").push(call);
            as_the_engine(unit)
        });
        let device = device();
        let model = hybrid::build(MLP, &world, [2, 2], policy)?;
        changes(&model)?;
        backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
        let calls = calls.lock().expect("no panic").clone();
        Ok(calls)
    });
    for other in &seen[1..] {
        let order = |calls: &[Call]| -> Vec<_> {
            calls.iter().map(|call| (call.0, call.1.clone())).collect()
        };
        assert_eq!(order(other), order(&seen[0]), "the same order on all ranks");
    }
    seen[0].clone()
}

#[test]
fn hooks_see_the_stage_and_the_parts() {
    use ReductionStage::{Replicas, Whole};
    let seen = calls(blocks(), |_| Ok(()));
    let stages: Vec<_> = seen.iter().map(|call| (call.0, call.1.as_str())).collect();
    let ended = ["blocks.2", "blocks.1", "blocks.0", "root"];
    let mut want = ended.map(|unit| (Replicas, unit)).to_vec();
    want.push((Whole, "root"));
    assert_eq!(stages, want);
    for (stage, _, size, divisor, lengths) in &seen {
        match stage {
            Replicas => assert_eq!((*size, *divisor), (2, 1.0)),
            _ => assert_eq!((*size, *divisor), (4, 4.0)),
        }
        assert!(lengths.iter().all(|(all, held)| all == held));
    }
    // The halves of three weights of 7 x 15; and in each block two vectors of the norm and two biases.
    assert_eq!(seen[0].4, [(53, 53); 3]);
    assert_eq!(seen[4].4.len(), 3 * 4 + 2);
    // Nothing is reduced over replicas before the last micro-batch.
    let waiting = calls(blocks(), |model| {
        units(model)?
            .iter()
            .try_for_each(|unit| unit.set_requires_all_reduce(false))
    });
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].0, Whole);
    // Units with other divisors have their own reduction of parameters kept whole.
    let divided = calls(blocks(), |model| {
        let factors = DivideFactors {
            pre: 1.0,
            post: 2.0,
        };
        units(model)?[1].set_divide_factors(factors)
    });
    let divisors = divided[4..].iter().map(|call| call.3).collect::<Vec<_>>();
    assert_eq!(divisors.len(), 2);
    assert!(divisors.contains(&2.0) && divisors.contains(&4.0));
    // Without shards, all reductions are the other hook's.
    let whole = calls(blocks().strategy(Strategy::NoShard), |_| Ok(()));
    assert_eq!(whole, []);
}

/// The parameters after one step with a loss that uses other blocks on each rank of 2 x 2.
fn with_gaps_on_replicas(policy: ShardPolicy) -> Outcome {
    let outcomes = on_ranks(4, move |world| {
        let device = device();
        let mut optim = optimizer();
        let model = hybrid::build(MLP, &world, [2, 2], policy.clone())?;
        let mut losses = Vec::new();
        let mut model = model;
        for _ in 0..3 {
            let loss = with_gaps(&model, world.rank(), &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        let params = whole_params((MLP.build)(&device), &model);
        Ok(Outcome { losses, params })
    });
    joined(&outcomes)
}

#[test]
fn ranks_and_replicas_without_a_gradient_take_part() {
    for hook in [as_the_engine, by_parts] {
        let want = with_gaps_on_replicas(blocks());
        let got = with_gaps_on_replicas(blocks().all_reduce_hook(hook));
        assert_eq!(got.params, want.params);
        for ranks in 1..=3 {
            let by = |policy: ShardPolicy| {
                stepped(MLP, ranks, policy, |model: &Mlp, world, device| {
                    backward(with_gaps(model, world.rank(), device), model)
                })
            };
            let want = by(blocks().whole_below(80));
            let got = by(blocks().whole_below(80).all_reduce_hook(hook));
            assert_eq!(got.params, want.params);
        }
    }
}

#[test]
fn held_gradients_go_through_the_hook() {
    let body = |policy: ShardPolicy| {
        let outcomes = on_ranks(4, move |world| {
            let device = device();
            let mut optim = optimizer();
            let model = hybrid::build(MLP, &world, [2, 2], policy.clone())?;
            no_sync(&model, || {
                backward((MLP.loss)(&model, world.rank(), 0, &device), &model)
            })??;
            let gradients = backward((MLP.loss)(&model, world.rank(), 1, &device), &model)?;
            let model = optim.step(1e-2, model, gradients);
            let params = whole_params((MLP.build)(&device), &model);
            let losses = Vec::new();
            Ok(Outcome { losses, params })
        });
        joined(&outcomes)
    };
    let wide = |_: &str, gradient: Tensor<1>| gradient.mul_scalar(2.0);
    let policy = blocks().gradient_hook(wide);
    let got = body(policy.clone().all_reduce_hook(as_the_engine));
    assert_eq!(got.params, body(policy).params);
}

/// Children that were sharded with another policy have their own reduction of parameters kept whole.
#[test]
fn each_policys_hook_reduces_its_own_parameters() {
    let seen = on_ranks(2, |world| {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let counting = |name: &'static str| {
            let seen = calls.clone();
            move |unit: &UnitReduction| {
                let number = unit.gradients().len();
                seen.lock().expect("no panic").push((name, number));
                as_the_engine(unit)
            }
        };
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let mut model = seeded_by_rank((MLP.build)(&device), world.rank());
        let inner = ShardPolicy::new().all_reduce_hook(counting("inner"));
        let block = model.blocks.remove(2);
        model.blocks.push(fully_shard(block, &mesh, inner)?);
        let outer = blocks().all_reduce_hook(counting("outer"));
        let model = fully_shard(model, &mesh, outer)?;
        backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
        let calls = calls.lock().expect("no panic").clone();
        Ok(calls)
    });
    for seen in seen {
        assert_eq!(seen, [("inner", 4), ("outer", 10)]);
    }
}

#[test]
fn invalid_results_are_errors_on_all_ranks() {
    type Hook = fn(&UnitReduction) -> Parts;
    let long: Hook = |unit| {
        let parts = as_the_engine(unit)?.wait()?.into_iter();
        Ok(parts.map(|part| Tensor::cat(vec![part; 2], 0)).collect())
    };
    let few: Hook = |unit| Ok(as_the_engine(unit)?.map(|parts| parts[1..].to_vec()));
    for (hook, want) in [(long, " elements for `"), (few, " tensors, expected ")] {
        for (stage, of) in [
            (
                ReductionStage::Replicas,
                "sum of unit `blocks.2` over replicas",
            ),
            (ReductionStage::Whole, "reduction of parameters kept whole"),
        ] {
            let seen = on_ranks(4, move |world| {
                let policy = blocks().all_reduce_hook(move |unit| match unit.stage() {
                    now if now == stage => hook(unit),
                    _ => as_the_engine(unit),
                });
                let device = device();
                let model = hybrid::build(MLP, &world, [2, 2], policy)?;
                let loss = (MLP.loss)(&model, world.rank(), 0, &device);
                let error = backward(loss, &model).expect_err("refused");
                assert!(matches!(error, Error::Hook { .. }), "{error}");
                world.barrier("the group is not affected")?;
                Ok(error.to_string())
            });
            for (rank, message) in seen.into_iter().enumerate() {
                assert!(message.contains(&format!("{of}, rank {rank}")), "{message}");
                assert!(message.contains(want), "{message}");
            }
        }
    }
}

#[test]
fn ranks_with_different_hooks_are_reported() {
    let message = panic_of(|| {
        on_ranks(2, |world| {
            let policy = match world.rank() {
                0 => blocks().all_reduce_hook(as_the_engine),
                _ => blocks(),
            };
            let device = device();
            let model = build(MLP, &world, &device, policy)?;
            backward((MLP.loss)(&model, world.rank(), 0, &device), &model)
        });
    });
    assert!(message.contains("exchange"), "{message}");
    assert!(message.contains("parameters kept whole"), "{message}");
}
