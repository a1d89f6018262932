//! Agreement of the ranks on the graph that they run.

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_fsdp_collectives::{Fingerprint, ProcessGroup};

use crate::error::Error;
use crate::trace::{Batch, base_rate, fixed_of, specs_of};

/// The message of a rank that has no graph to run.
const NOT_READY: [u8; 8] = [0; 8];

/// Checks that all ranks are about to run the graph with this fingerprint; `None` means that this rank has no graph.
/// `batch` is this rank's batch with its number of micro-batches, for the error. All ranks must call it.
///
/// # Errors
///
/// [`Error::PeerNotReady`], [`Error::GraphsDiffer`], [`Error::Collective`].
pub(super) fn agree<B: Batch>(
    group: &ProcessGroup,
    fingerprint: Option<u64>,
    rates: &ModuleLearningRate,
    batch: Option<(&B, usize)>,
) -> Result<(), Error> {
    // Learning rates of groups are in the fingerprint. A rank without a rate is not ready.
    let learning_rate = base_rate(rates).unwrap_or_default();
    let said = fingerprint.map_or(NOT_READY, |fingerprint| {
        let said = Fingerprint::of(&(fingerprint, learning_rate.to_bits()));
        said.max(1).to_le_bytes()
    });
    let all = group.exchange("step", said.to_vec());
    let all = all.map_err(Error::among_ranks)?;
    if let Some(rank) = all.iter().position(|other| *other == NOT_READY) {
        return Err(Error::PeerNotReady { rank });
    }
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    // If ranks differ, all of them reach this point, and exchange descriptions of their batches.
    let text = match batch {
        None => "no batch".to_owned(),
        Some((batch, 1)) => described(batch)?,
        Some((batch, of)) => format!("{}, one of {of} micro-batches,", described(batch)?),
    };
    let text = format!("{text} at learning rate {learning_rate}");
    let texts = group.exchange("batches of a step", text.into_bytes());
    let texts = texts.map_err(Error::among_ranks)?;
    let text = |rank: usize| String::from_utf8_lossy(&texts[rank]).into_owned();
    let (first, other) = (text(0), text(rank));
    let difference = if first == other {
        format!(
            "both have {first}, but differ in the model, the loss, the mode (options, seed), the optimizers or rates of \
             groups, the number of steps or the scale of the loss"
        )
    } else {
        format!("rank 0 has {first}, rank {rank} has {other}")
    };
    Err(Error::GraphsDiffer { rank, difference })
}

/// Describes a batch: names, types and shapes of its tensors, and hashes of its other values.
fn described<B: Batch>(batch: &B) -> Result<String, Error> {
    let tensors = specs_of(batch)?;
    let tensors = tensors
        .iter()
        .map(|spec| format!("\"{}\" {:?} {:?}", spec.name, spec.dtype, spec.shape));
    let fixed = fixed_of(batch);
    let fixed = fixed
        .iter()
        .map(|(name, hash)| format!("\"{name}\" of hash {hash:016x}"));
    let parts: Vec<_> = tensors.chain(fixed).collect();
    Ok(if parts.is_empty() {
        "an empty batch".to_owned()
    } else {
        parts.join(", ")
    })
}
