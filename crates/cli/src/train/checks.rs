//! Checks of a run before it starts: flags that compiled steps do not support, f16 reduction without loss scaling,
//! token counts that overflow, and runs that do not fit into memory.

use burn_fsdp::Strategy;
use burn_fsdp_models::ModelConfig;

use crate::args::{Float, TrainArgs, least_bytes};
use crate::enough;
use crate::error::InputError;
use crate::host;
use crate::train::ranks::Ranks;
use crate::train::recipe::Recipe;

/// Rejects flags that a compiled step does not support.
pub(super) fn check_compiled(args: &TrainArgs) -> Result<(), InputError> {
    let (training, sharding) = (&args.training, &args.sharding);
    let refusals = [
        (
            sharding.offload.is_some(),
            "--offload",
            "all their tensors are on the device",
        ),
        (
            args.model.lora.base_bits.is_some(),
            "--base-bits",
            "their frozen weights have the type in which they compute",
        ),
        (
            training.no_sync,
            "--no-sync",
            "they accumulate gradients in shards, never as a whole",
        ),
        (
            sharding.prefetch.is_some_and(|units| units > 1),
            "--prefetch of more than 1",
            "they gather each unit while the previous one computes, and none earlier",
        ),
    ];
    let planned = [
        (training.memory_budget.is_some(), "--memory-budget"),
        (training.certify, "--certify"),
    ];
    let planned = planned.into_iter().find(|(is_given, _)| *is_given);
    if let Some((_, first)) = planned.filter(|_| !training.device.is_host()) {
        return Err(InputError::Excludes {
            first,
            second: "--compile on a --device other than flex",
            reason: "the plan is of the CPU's kernels and memory",
        });
    }
    if training.memory_budget.is_some() && training.precision == Float::F16 {
        return Err(InputError::Excludes {
            first: "--memory-budget",
            second: "--precision f16",
            reason: "a step with loss scaling consists of several graphs, like a step of micro-batches",
        });
    }
    if training.certify && ![1, 2, 4, 8].contains(&training.loss_chunks) {
        return Err(InputError::Excludes {
            first: "--certify",
            second: "--loss-chunks other than 2, 4 and 8",
            reason: "the proof is of 8 tokens, which must have equal parts",
        });
    }
    if training.activation_checkpointing && sharding.unit_size.is_some() {
        return Err(InputError::Excludes {
            first: "--activation-checkpointing",
            second: "--compile and --unit-size",
            reason: "a compiled step recomputes whole units, and the blocks are not units then",
        });
    }
    let refused = refusals.into_iter().find(|(is_given, ..)| *is_given);
    match refused {
        Some((_, flag, reason)) => Err(InputError::NotCompiled { flag, reason }),
        None => Ok(()),
    }
}

/// Rejects f16 reduction without loss scaling, because small gradients would become 0.
pub(super) fn check_reduction(args: &TrainArgs) -> Result<(), InputError> {
    let training = &args.training;
    if training.reduce_dtype == Some(Float::F16) && training.precision != Float::F16 {
        Err(InputError::Excludes {
            first: "--reduce-dtype f16",
            second: "--precision f32 or bf16",
            reason: "only --precision f16 scales the loss; without scaling, small gradients become 0 in f16",
        })
    } else {
        Ok(())
    }
}

/// Checks that the total number of tokens of the run does not overflow.
pub(super) fn check_size(args: &TrainArgs) -> Result<(), InputError> {
    let steps = args.training.steps.checked_add(args.training.warmup);
    steps
        .and_then(|steps| steps.checked_add(1))
        .and_then(|steps| steps.checked_mul(args.training.batch))
        .and_then(|rows| rows.checked_mul(args.model.seq))
        .map(|_| ())
        .ok_or(InputError::TooManyTokens)
}

/// Rejects a run that cannot fit, because the allocator would end the process without a message.
///
/// The ranks of this process hold parameters, gradients and optimizer state, sharded or not, and the logits with their
/// gradient. This is a lower bound: a run that passes may still be too large.
pub(super) fn check_memory(
    args: &TrainArgs,
    (model, optimizer): (&ModelConfig, &Recipe),
    ranks: &Ranks,
    (strategy, replicas): (Strategy, usize),
) -> Result<(), InputError> {
    let Some(available) = host::memory_bytes(ranks.processes_here()) else {
        return Ok(());
    };
    let params = model.num_params();
    let (number, own) = (ranks.number() as u128, ranks.of_process() as u128);
    let copies = match strategy {
        Strategy::NoShard => number,
        Strategy::FullShard | Strategy::ShardGradOp => replicas as u128,
    };
    let values = match (args.model.lora.flag(), &args.sharding.offload) {
        // Frozen parameters have neither gradients nor moments.
        (Some(_), _) => params as u128,
        (None, Some(_)) => 2 * params as u128,
        (None, None) => 2 * params as u128 + optimizer.num_values() as u128,
    };
    let (batch, seq) = (args.training.batch as u128, args.model.seq as u128);
    let state = least_bytes(args.model.lora.base_bits, values) * copies * own / number;
    let logits = 8 * batch * seq * (model.vocab() as u128) * own / number;
    // A rank has a thread and an entry for each other rank. Each of its parameters is an object, even with few
    // elements.
    let per_rank = (64 << 10) + 24 * number + 12 * 1024 * model.num_layers() as u128;
    let needed = state.saturating_add(logits);
    let needed = needed.saturating_add(per_rank.saturating_mul(own));
    enough::memory(params, ranks.number(), needed, available)
}
