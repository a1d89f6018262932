//! The fault that the environment variable `BURN_FSDP_FAULT` requests.

use std::env;

use burn_fsdp::Strategy;
use burn_fsdp::internals::testing::{At, Fault, How};

use crate::error::InputError;

const FAULT_VARIABLE: &str = "BURN_FSDP_FAULT";

/// Reads the fault from the environment. Rejects a fault that can never happen, because a test with it would pass
/// without testing anything.
pub(crate) fn from_environment(
    ranks: usize,
    steps: usize,
    is_compiled: bool,
    strategy: Strategy,
    is_offloaded: bool,
) -> Result<Option<Fault>, InputError> {
    let Some(text) = env::var_os(FAULT_VARIABLE) else {
        return Ok(None);
    };
    let invalid = |problem| Err(InputError::Fault { problem });
    let fault = match Fault::parse(&text.to_string_lossy()) {
        Ok(fault) => fault,
        Err(error) => return invalid(error.to_string()),
    };
    if fault.rank >= ranks {
        return invalid(format!(
            "there is no rank {} among {ranks}; ranks count from 0",
            fault.rank
        ));
    }
    if fault.step >= steps as u64 {
        return invalid(format!(
            "there is no step {} among {steps}; steps count from 0, warmup included",
            fault.step
        ));
    }
    if fault.how == How::Stall && ranks == 1 {
        return invalid(
            "a stall of the only rank would never end, because no other rank waits for it; choose --ranks 2 or \
             how:error"
                .to_owned(),
        );
    }
    if fault.at == At::Running {
        return invalid("the model has no running states; choose another place".to_owned());
    }
    if fault.at == At::State && is_offloaded {
        return invalid(
            "with --offload, the optimizer state is in files with their own checksums; leave out --offload, or \
             change a file"
                .to_owned(),
        );
    }
    if fault.at == At::Weight && (ranks == 1 || strategy == Strategy::NoShard) {
        return invalid(
            "no weight is gathered if each rank holds all of it; choose --ranks 2 and a strategy with shards, or \
             at:shard"
                .to_owned(),
        );
    }
    if fault.at == At::Gradient && ranks == 1 && is_compiled {
        return invalid(
            "a compiled step of one rank reduces no gradient; choose --ranks 2".to_owned(),
        );
    }
    if fault.how == How::Flip && fault.at == At::Collective && ranks == 1 {
        return invalid(
            "a bit flips in the bytes that a rank sends to others, but there are no others; choose --ranks 2"
                .to_owned(),
        );
    }
    if is_compiled && fault.at == At::Backward {
        return invalid(
            "a compiled step has no separate backward; choose at:forward or at:collective"
                .to_owned(),
        );
    }
    Ok(Some(fault))
}
