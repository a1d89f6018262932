//! The models crate's GPT, sharded: counts, order, bytes and losses.

use std::time::Duration;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fsdp::inspect::{memory, num_params, wrap_plan};
use burn_fsdp::internals::collectives::OperationKind;
use burn_fsdp::internals::inspect::order;
use burn_fsdp::internals::inspect::reset_peak;
use burn_fsdp::internals::sharding::DivideFactors;
use burn_fsdp::{
    Error, LaunchConfig, Mesh, Precision, ProcessGroup, ProcessMesh, ShardPolicy, Strategy,
    backward, fully_shard, launch,
};
use burn_fsdp_models::{Batches, Gpt, GptConfig, TokenStream};

const CONFIG: GptConfig = GptConfig {
    layers: 6,
    dim: 48,
    heads: 3,
    vocab: 67,
    seq: 32,
};
const BATCH: usize = 12;

fn checkpointing() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

fn loss(model: &Gpt, step: usize, rows: std::ops::Range<usize>, device: &Device) -> Tensor<1> {
    let batches = Batches {
        stream: TokenStream::Synthetic {
            vocab: CONFIG.vocab,
        },
        batch: BATCH,
        seq: CONFIG.seq,
    };
    let (inputs, targets) = batches.rows(step, rows).to_tensors(device);
    model.loss(inputs, targets)
}

fn own_rows(world: &ProcessGroup) -> std::ops::Range<usize> {
    let rows = BATCH / world.size();
    world.rank() * rows..(world.rank() + 1) * rows
}

fn on_ranks<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup, ProcessMesh) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(60));
    let body = move |world: ProcessGroup| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        body(world, mesh)
    };
    launch(config, body).unwrap_or_else(|error| panic!("{error}"))
}

fn optimizer() -> burn::optim::ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-2).init()
}

fn plain_losses(steps: usize) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = CONFIG.init(&device, 5).expect("valid");
    let mut optim = optimizer();
    let mut losses = Vec::new();
    for step in 0..steps {
        let loss = loss(&model, step, 0..BATCH, &device);
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, gradients);
    }
    losses
}

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

const STEPS: usize = 10;

/// Losses by step, the mean over the ranks.
fn sharded_losses(ranks: usize, policy: ShardPolicy) -> Vec<f32> {
    let outcomes = on_ranks(ranks, move |world, mesh| {
        let device = checkpointing();
        let model = CONFIG.init(&device, 5).expect("valid");
        let mut model = fully_shard(model, &mesh, policy.clone())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = loss(&model, step, own_rows(&world), &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(losses)
    });
    let sum = |step| outcomes.iter().map(|losses| losses[step]).sum::<f32>();
    (0..STEPS).map(|step| sum(step) / ranks as f32).collect()
}

fn assert_losses(got: &[f32], want: &[f32], tolerance: f32, of: &str) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        let difference = (got - want).abs() / want;
        assert!(difference <= tolerance, "{of}, step {step}: {got} {want}");
    }
}

#[test]
fn losses_agree_with_the_plain_model() {
    let want = plain_losses(STEPS);
    for ranks in 1..=4 {
        for strategy in [
            Strategy::FullShard,
            Strategy::ShardGradOp,
            Strategy::NoShard,
        ] {
            let got = sharded_losses(ranks, blocks().strategy(strategy));
            assert_losses(&got, &want, 1e-5, &format!("{strategy:?}, {ranks} ranks"));
        }
    }
}

#[test]
fn hooks_and_factors_agree_with_the_plain_model() {
    let want = plain_losses(STEPS);
    for ranks in 1..=4 {
        let balanced = blocks().divide_factors(DivideFactors::balanced(ranks));
        let undone = blocks()
            .divide_factors(DivideFactors {
                pre: 2.0,
                post: ranks as f64,
            })
            .gradient_hook(|_, gradient| gradient.mul_scalar(2.0));
        for policy in [balanced, undone] {
            let got = sharded_losses(ranks, policy);
            assert_losses(&got, &want, 1e-5, &format!("{ranks} ranks"));
        }
    }
}

#[test]
fn halves_track_the_plain_model() {
    let want = plain_losses(STEPS);
    for ranks in 1..=4 {
        for (dtype, tolerance) in [(FloatDType::BF16, 0.02), (FloatDType::F16, 0.005)] {
            let policy = blocks().precision(Precision::new(dtype).reduce(FloatDType::F32));
            let got = sharded_losses(ranks, policy);
            assert_losses(&got, &want, tolerance, &format!("{dtype:?}, {ranks} ranks"));
            assert_ne!(got, want, "it was computed in halves");
        }
    }
}

#[test]
fn a_step_gathers_reduces_and_frees_unit_by_unit() {
    for prefetch in 0..2 {
        let seen = on_ranks(2, move |world, mesh| {
            let device = checkpointing();
            let model = CONFIG.init(&device, 5).expect("valid");
            let mut model = fully_shard(model, &mesh, blocks().prefetch(prefetch))?;
            let mut optim = optimizer();
            let mut before = world.counts();
            for step in 0..4 {
                reset_peak(&model)?;
                before = world.counts();
                let gradients = backward(loss(&model, step, own_rows(&world), &device), &model)?;
                model = optim.step(1e-2, model, gradients);
            }
            let counts = world.counts().since(&before);
            Ok((counts, memory(&model)?, order(&model)?, wrap_plan(&model)?))
        });
        let (counts, memory, order, plan) = &seen[0];
        let units = CONFIG.layers as u64 + 1;
        let number = |kind| counts.of(kind).operations;
        assert_eq!(number(OperationKind::AllGather), 2 * units - 1);
        assert_eq!(number(OperationKind::ReduceScatter), units);
        assert_eq!(number(OperationKind::AllReduce), 1);

        let root = plan.units[0].unsharded;
        let block = plan.units[1].unsharded;
        let in_flight = if prefetch == 0 { 2 } else { 4 };
        assert!(memory.unsharded_peak <= 2 * root + in_flight * block);
        assert!(memory.unsharded_peak <= plan.unsharded_peak());
        assert_eq!(memory.unsharded_live, 0);
        assert_eq!(memory.pinned, []);

        // Backward: each block's gradients are reduced before the next block is asked for.
        let backward = &order.operations[units as usize..];
        for (index, pair) in (0..CONFIG.layers).rev().zip(backward.chunks(2)) {
            assert_eq!(
                pair[0],
                format!("backward unshard blocks.{index}"),
                "{order}"
            );
            assert_eq!(pair[1], format!("reduce blocks.{index}"), "{order}");
        }
    }
}

#[test]
fn parameter_counts_ignore_sharding() {
    let counts = on_ranks(3, |_, mesh| {
        let model = CONFIG.init(&checkpointing(), 5).expect("valid");
        let model = fully_shard(model, &mesh, blocks())?;
        Ok((num_params(&model), wrap_plan(&model)?.num_params()))
    });
    assert_eq!(counts[0], (CONFIG.num_params(), CONFIG.num_params()));
}

#[test]
fn a_model_cloned_into_ranks_is_sharded_on_each() {
    let want = plain_losses(3);
    let device = checkpointing();
    let model = CONFIG.init(&device, 5).expect("valid");
    let outcomes = on_ranks(4, move |world, mesh| {
        let device = checkpointing();
        let mut model = fully_shard(model.clone(), &mesh, blocks())?;
        let mut optim = optimizer();
        let mut losses = Vec::new();
        for step in 0..3 {
            let loss = loss(&model, step, own_rows(&world), &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optim.step(1e-2, model, gradients);
        }
        Ok(losses)
    });
    for (step, want) in want.iter().enumerate() {
        let got = outcomes.iter().map(|losses| losses[step]).sum::<f32>() / 4.0;
        assert!(
            (got - want).abs() <= 1e-5 * want,
            "step {step}: {got} {want}"
        );
    }
}

#[test]
fn a_rank_that_fails_in_backward_is_named_on_every_rank() {
    let fault = "rank:1,step:1,at:backward,how:error"
        .parse()
        .expect("a fault");
    let config = LaunchConfig::new(2).deadline(Duration::from_secs(20));
    let result = launch(config, move |world| {
        world.set_fault(fault);
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let device = checkpointing();
        let model = CONFIG.init(&device, 5).expect("valid");
        let model = fully_shard(model, &mesh, blocks())?;
        for step in 0..3 {
            world.begin_step(step);
            let result = backward(
                loss(&model, step as usize, own_rows(&world), &device),
                &model,
            );
            if let Err(error) = result {
                assert_eq!(
                    memory(&model)?.unsharded_live,
                    0,
                    "everything is sharded again"
                );
                return Err(error);
            }
        }
        Ok(())
    });
    let message = result.expect_err("rank 1 fails").to_string();
    assert!(message.contains("rank 1"), "{message}");
}
