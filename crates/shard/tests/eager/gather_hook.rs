//! Gathers by the policy's hook instead of the engine.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fsdp_collectives::{Check, LaunchConfig, OperationKind, ProcessGroup, launch};
use burn_fsdp_mesh::Strategy;
use burn_fsdp_shard::{
    Audit, Cut, Error, ParameterShard, PendingTensors, Pinned, Precision, ShardPolicy, UnitGather,
    backward, catch, evaluate, memory, no_sync, recompute, reset_peak, units,
};

use super::bench::{
    Case, SEED, assert_close, build, device, on_ranks, panic_of, params, plain_device, plainly,
    seeded, sharded, since, stepped, whole_params,
};
use super::hybrid;
use super::nets::{Block, CONV_NET, MLP, Mlp, RECURRENT, tokens};
use super::reduction_hook::with_gaps;

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

type Gathered = Result<PendingTensors, Error>;

/// Does the engine's work with the hook's own gather.
fn as_the_engine(unit: &UnitGather) -> Gathered {
    unit.all_gather(unit.shards().iter().map(ParameterShard::tensor).collect())
}

/// Sends 32-bit weights in 16 bits.
fn in_halves(unit: &UnitGather) -> Gathered {
    let shards = unit.shards().iter();
    unit.all_gather(shards.map(|s| s.tensor().cast(DType::BF16)).collect())
}

/// Exchanges the shards as notes, and joins them by their partitions.
fn by_notes(unit: &UnitGather) -> Gathered {
    let mut whole = Vec::new();
    for shard in unit.shards() {
        let own = shard.tensor();
        let (dtype, device) = (own.dtype(), own.device());
        assert_eq!(own.dims(), [shard.held().len()]);
        let group = unit.group();
        assert_eq!(shard.partition().range(group.rank()), shard.held());
        let sent = own.into_data().as_bytes().to_vec();
        let notes = group.exchange(format!("shards of {}", shard.path()), sent)?;
        let mut full = vec![0; shard.shape().iter().product::<usize>() * dtype.size()];
        for (note, range) in notes.iter().zip(shard.partition().ranges()) {
            full[range.start * dtype.size()..range.end * dtype.size()].copy_from_slice(note);
        }
        let elements = full.len() / dtype.size();
        let data = TensorData::from_bytes_vec(full, [elements], dtype);
        whole.push(Tensor::from_data(data, (&device, dtype)));
    }
    Ok(whole.into())
}

fn hooks_train<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy) {
    for ranks in 1..=4 {
        let want = plainly(case, ranks, 5);
        let policies = [
            policy.clone(),
            policy.clone().cut(Cut::Dims).shard_vectors(true),
            policy.clone().one_owner(["**"]),
            policy.clone().strategy(Strategy::ShardGradOp),
            policy.clone().prefetch(2).audit(Audit::EveryStep),
            policy.clone().reshard_root(true),
        ];
        for policy in policies {
            let engine = sharded(case, ranks, 5, policy.clone());
            assert_close(&engine, &want, 1e-5);
            for hook in [as_the_engine, by_notes] {
                let got = sharded(case, ranks, 5, policy.clone().gather_hook(hook));
                assert_eq!(got.losses, engine.losses);
                assert_eq!(got.params, engine.params, "the same bits");
            }
        }
    }
}

#[test]
fn gathers_by_hooks_are_bit_identical() {
    hooks_train(MLP, &blocks());
    hooks_train(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
    hooks_train(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
    let halves = Precision::new(FloatDType::BF16).reduce(FloatDType::F32);
    for ranks in 1..=3 {
        let policy = blocks().precision(halves.clone());
        let want = sharded(MLP, ranks, 5, policy.clone());
        let got = sharded(MLP, ranks, 5, policy.gather_hook(as_the_engine));
        assert_eq!(got.params, want.params);
    }
}

#[test]
fn replicas_gather_by_hooks() {
    for layout in [[2, 1], [2, 2], [1, 3]] {
        let want = hybrid::trained(MLP, layout, blocks(), 5);
        assert_close(&want, &plainly(MLP, layout[0] * layout[1], 5), 1e-5);
        let policy = blocks().gather_hook(as_the_engine);
        let got = hybrid::trained(MLP, layout, policy, 5);
        assert_eq!(got.params, want.params);
    }
}

/// The gathers of the third step: operations and bytes, and operations of all kinds.
fn traffic(ranks: usize, policy: ShardPolicy) -> (u64, u64, u64) {
    let counts = on_ranks(ranks, move |world| {
        let device = device();
        let model = build(MLP, &world, &device, policy.clone())?;
        let mut counts = world.counts();
        for step in 0..3 {
            let before = world.counts();
            backward((MLP.loss)(&model, world.rank(), step, &device), &model)?;
            counts = since(&world, &before);
        }
        let gathers = counts.of(OperationKind::AllGather);
        Ok((gathers.operations, gathers.bytes, counts.total().operations))
    });
    counts[0]
}

#[test]
fn a_hook_adds_no_operation_and_can_halve_the_traffic() {
    for ranks in 1..=3 {
        let (gathers, bytes, all) = traffic(ranks, blocks());
        // The root once, each block twice.
        assert_eq!(gathers, 7);
        for prefetch in [0, 2] {
            let policy = blocks().prefetch(prefetch);
            let engine = traffic(ranks, policy.clone().gather_hook(as_the_engine));
            assert_eq!(engine, (7, bytes, all));
            let halves = traffic(ranks, policy.clone().gather_hook(in_halves));
            assert_eq!((halves.0, 2 * halves.1, halves.2), (7, bytes, all));
            let (gathers, ..) = traffic(ranks, policy.gather_hook(by_notes));
            assert_eq!(gathers, 0);
        }
    }
}

/// The weight of a block that the model computes with, in evaluation.
fn up(model: &Mlp) -> Vec<f32> {
    let values = model.blocks[1].up.weight.val().into_data();
    values.try_to_vec().expect("32 bits")
}

/// A float in bf16 has 8 significant bits, so it is within 2^-8 of the exact one.
#[test]
fn weights_in_16_bits_stay_within_their_bound() {
    let exact = params(&seeded(Mlp::new(&plain_device()), SEED));
    let weight = exact.iter().find(|(path, _)| path == "blocks.1.up.weight");
    let weight = weight.expect("a parameter").1.clone();
    for ranks in 1..=4 {
        let exact = exact.clone();
        let seen = on_ranks(ranks, move |world| {
            let device = device();
            let policy = blocks().gather_hook(in_halves);
            let model = build(MLP, &world, &device, policy)?;
            let held = whole_params(Mlp::new(&device), &model);
            assert_eq!(held, exact, "shards and records stay exact");
            evaluate(&model, up)
        });
        for got in &seen {
            assert_eq!(got, &seen[0], "all ranks compute with the same bits");
            let apart = got.iter().zip(&weight);
            let apart = apart.map(|(got, want)| (got - want).abs() / want.abs());
            let largest = apart.fold(0.0, f32::max);
            let bound = 1.0 / 256.0;
            assert!((1e-4..=bound).contains(&largest), "{largest}");
        }
        let got = sharded(MLP, ranks, 5, blocks().gather_hook(in_halves));
        assert_close(&got, &plainly(MLP, ranks, 5), 2e-2);
    }
}

#[test]
fn neighbours_gather_their_pieces_by_the_hook() {
    let policy = || blocks().reshard_after_forward_to(2);
    let want = sharded(MLP, 4, 5, policy());
    for hook in [as_the_engine, by_notes] {
        let got = sharded(MLP, 4, 5, policy().gather_hook(hook));
        assert_eq!(got.params, want.params);
    }
    let seen = on_ranks(4, |world| {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = calls.clone();
        let policy = blocks()
            .reshard_after_forward_to(2)
            .gather_hook(move |unit| {
                let call = (unit.unit().to_owned(), unit.group().size());
                seen.lock().expect("no panic").push(call);
                as_the_engine(unit)
            });
        let device = device();
        let model = build(MLP, &world, &device, policy)?;
        backward((MLP.loss)(&model, world.rank(), 0, &device), &model)?;
        let calls = calls.lock().expect("no panic").clone();
        Ok(calls)
    });
    let forward = ["root", "blocks.0", "blocks.1", "blocks.2"].map(|unit| (unit.to_owned(), 4));
    let again = ["blocks.2", "blocks.1", "blocks.0"].map(|unit| (unit.to_owned(), 2));
    for seen in seen {
        assert_eq!(seen, [&forward[..], &again[..]].concat());
    }
}

/// The peak of full parameters and gradients in the third step, the bytes alive after it, and the units that outlive
/// forward.
fn peak(policy: ShardPolicy) -> (usize, usize, usize) {
    let seen = on_ranks(2, move |world| {
        let device = device();
        let model = build(MLP, &world, &device, policy.clone())?;
        for step in 0..3 {
            reset_peak(&model)?;
            backward((MLP.loss)(&model, world.rank(), step, &device), &model)?;
        }
        let memory = memory(&model)?;
        let pinned = memory.pinned.len();
        Ok((memory.unsharded_peak, memory.unsharded_live, pinned))
    });
    seen[0]
}

#[test]
fn full_parameters_of_hooks_are_counted_and_not_gathered_early() {
    let none = peak(blocks().prefetch(0));
    assert!(none.0 > 0);
    let ahead = |hook: fn(&UnitGather) -> Gathered| peak(blocks().prefetch(2).gather_hook(hook));
    let one = ahead(as_the_engine);
    // One reduction is still in progress while the next unit's gradients are computed.
    assert!(one.0 < peak(blocks().prefetch(2)).0);
    for hook in [as_the_engine, in_halves, by_notes] {
        assert_eq!(peak(blocks().prefetch(0).gather_hook(hook)), none);
        assert_eq!(ahead(hook), one);
    }
}

/// The units whose full weights outlive forward on a device on which products save their weights.
fn pinned(policy: ShardPolicy) -> Vec<Pinned> {
    let seen = on_ranks(2, move |world| {
        let device = plain_device().autodiff();
        let model = build(MLP, &world, &device, policy.clone())?;
        backward(model.loss_of_row(world.rank(), 0, &device), &model)?;
        Ok(memory(&model)?.pinned)
    });
    seen[0].clone()
}

#[test]
fn weights_of_hooks_that_outlive_forward_are_reported() {
    let want = pinned(blocks());
    assert!(want.len() >= 2, "{want:?}");
    for hook in [as_the_engine, in_halves] {
        assert_eq!(pinned(blocks().gather_hook(hook)), want);
    }
}

/// A region around each block.
fn in_regions(model: &Mlp, rank: usize, step: usize, device: &Device) -> Tensor<1> {
    let mut x = model.embed.forward(tokens([2, 4], 11, rank, step, device));
    for block in &model.blocks {
        x = recompute(block, x, |block: &Block, x| block.forward(x));
    }
    let x = model.head.forward(model.norm.forward(x));
    x.powf_scalar(2.0).mean()
}

#[test]
fn ranks_that_do_not_need_a_unit_take_part() {
    let bodies: [fn(&Mlp, &ProcessGroup, &Device) -> _; 3] = [
        |model, world, device| backward(with_gaps(model, world.rank(), device), model),
        |model, world, device| backward(in_regions(model, world.rank(), 0, device), model),
        |model, world, device| {
            no_sync(model, || {
                backward((MLP.loss)(model, world.rank(), 0, device), model)
            })??;
            backward((MLP.loss)(model, world.rank(), 1, device), model)
        },
    ];
    for body in bodies {
        for ranks in 1..=3 {
            let want = stepped(MLP, ranks, blocks(), body);
            for hook in [as_the_engine, by_notes] {
                let policy = blocks().gather_hook(hook);
                assert_eq!(stepped(MLP, ranks, policy, body).params, want.params);
            }
        }
    }
}

#[test]
fn evaluations_and_units_gathered_by_hand_call_the_hook() {
    for ranks in 1..=3 {
        on_ranks(ranks, |world| {
            let device = device();
            let inner = device.clone().without_autodiff();
            let calls = Arc::new(Mutex::new(0));
            let seen = calls.clone();
            let policy = blocks().gather_hook(move |unit| {
                *seen.lock().expect("no panic") += 1;
                by_notes(unit)
            });
            let model = build(MLP, &world, &device, policy)?;
            let of = |model: &Mlp| {
                with_gaps(model, world.rank(), &inner)
                    .into_data()
                    .try_to_vec::<f32>()
            };
            let plain = seeded(Mlp::new(&inner), SEED);
            let got = evaluate(&model, of)?.expect("32 bits");
            assert_eq!(got, of(&plain).expect("32 bits"));
            let called = || std::mem::take(&mut *calls.lock().expect("no panic"));
            // The root, and the blocks that some rank runs.
            assert_eq!(called(), 3);
            for unit in units(&model)? {
                unit.unshard()?.wait()?;
                unit.reshard()?;
            }
            assert_eq!(called(), 4);
            whole_params(Mlp::new(&device), &model);
            assert_eq!(called(), 0, "records are read from the shards");
            Ok(())
        });
    }
}

#[test]
fn invalid_gathers_are_errors_on_all_ranks() {
    type Hook = fn(&UnitGather) -> Gathered;
    let hooks: [(Hook, &str); 5] = [
        (
            |unit| Ok(as_the_engine(unit)?.map(|full| full[1..].to_vec())),
            "returned 0 tensors, expected 1 tensors",
        ),
        (
            |unit| Ok(unit.shards().iter().map(ParameterShard::tensor).collect()),
            "elements for `embed.weight`",
        ),
        (
            |unit| {
                let full = as_the_engine(unit)?.wait()?.into_iter();
                let device = device();
                let tracked = full.map(|full| Tensor::from_data(full.into_data(), &device));
                Ok(tracked.collect())
            },
            "a tensor with a graph",
        ),
        (
            |unit| unit.all_gather(Vec::new()),
            "passed `all_gather` 0 tensors",
        ),
        (
            |unit| {
                let shards = unit.shards().iter();
                unit.all_gather(
                    shards
                        .map(|s| Tensor::cat(vec![s.tensor(); 2], 0))
                        .collect(),
                )
            },
            "passed `all_gather`",
        ),
    ];
    for (hook, want) in hooks {
        let seen = on_ranks(2, move |world| {
            let device = device();
            // The first unit has one gathered parameter, and the head has the same unit.
            let policy = blocks().ignore(["head"]).gather_hook(hook);
            let model = build(MLP, &world, &device, policy)?;
            let loss = catch(|| (MLP.loss)(&model, world.rank(), 0, &device));
            let error = loss.expect_err("refused");
            assert!(matches!(error, Error::Hook { .. }), "{error}");
            world.barrier("the group is not affected")?;
            Ok(error.to_string())
        });
        for (rank, message) in seen.into_iter().enumerate() {
            let of = format!("gather of unit `root`, rank {rank}");
            assert!(message.contains(&of), "{message}");
            assert!(message.contains(want), "{message}");
        }
    }
}

#[test]
fn ranks_with_different_gathers_are_reported() {
    let message = panic_of(|| {
        on_ranks(2, |world| {
            let policy = match world.rank() {
                0 => blocks().gather_hook(as_the_engine),
                _ => blocks(),
            };
            let device = device();
            let model = build(MLP, &world, &device, policy)?;
            backward((MLP.loss)(&model, world.rank(), 0, &device), &model)
        });
    });
    assert!(message.contains("root unshard, forward"), "{message}");
    assert!(message.contains("hook"), "{message}");
}

#[test]
fn different_bits_on_ranks_are_detected_if_ranks_compare_bytes() {
    let train = |spoiled: Option<usize>| {
        let deadline = std::time::Duration::from_secs(60);
        let config = LaunchConfig::new(3).deadline(deadline);
        launch(config.check(Check::Agreement), move |world| {
            let rank = world.rank();
            let policy = blocks().gather_hook(move |unit| {
                let mut full = as_the_engine(unit)?.wait()?;
                if spoiled == Some(rank) && unit.unit() == "blocks.1" {
                    full[0] = full[0].clone() + 1e-3;
                }
                Ok(full.into())
            });
            let device = device();
            let model = build(MLP, &world, &device, policy)?;
            for step in 0..2 {
                backward((MLP.loss)(&model, rank, step, &device), &model)?;
            }
            Ok::<_, Error>(())
        })
    };
    train(None).expect("the same bits");
    let error = train(Some(1)).expect_err("other bits").to_string();
    let what = "the hook's gather of `blocks.1.up.weight`";
    assert!(error.contains(what), "{error}");
    assert!(error.contains("rank 1"), "{error}");
}

#[test]
fn hooks_exclude_the_engines_8_bits() {
    let policy = blocks().gather_hook(as_the_engine).gather_in_8_bits(true);
    let message = panic_of(move || sharded(MLP, 2, 1, policy));
    assert!(message.contains("gather_hook is set"), "{message}");
    assert!(message.contains("`gather_in_8_bits`"), "{message}");
}
