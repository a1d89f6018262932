//! The type of tensors that a forward makes without naming one.
//!
//! Burn gives them the default type of the device. Recurrent layers begin with such states, and collect their outputs in such
//! a tensor: with parameters in 16 bits they would meet two types.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, TensorData};
use burn_ir::{IntOperationIr, OperationIr, TensorId};

use super::TraceOptions;
use super::parameters::parameters_with;
use crate::error::Error;
use crate::graph::operation_name;

impl TraceOptions {
    /// Returns true if new tensors have the type in which parameters compute.
    pub(super) fn is_narrow(&self) -> bool {
        !self.stored.is_empty()
    }

    /// Returns the options for a trace in which new tensors have the type in which parameters compute; `None` if they have it
    /// anyhow.
    fn narrow<M: Module>(&self, init: impl Fn(&Device) -> M) -> Result<Option<Self>, Error> {
        let (Some(defaults), Some(compute)) = (self.defaults, self.precision.compute()) else {
            return Ok(None);
        };
        let specs = parameters_with(self.defaults, init)?.into_iter();
        let is_narrow = defaults.with_float(compute) != defaults;
        Ok(is_narrow.then(|| Self {
            defaults: Some(defaults.with_float(compute)),
            stored: specs.map(|(_, spec)| (spec.path, spec.dtype)).collect(),
            ..self.clone()
        }))
    }
}

/// Returns what `trace` makes. Where two types meet, it is asked again, with new tensors in the type in which parameters
/// compute. If that does not help, the first error counts.
pub(super) fn by_types<M: Module, T>(
    init: impl Fn(&Device) -> M,
    options: &TraceOptions,
    trace: impl Fn(&TraceOptions) -> Result<T, Error>,
) -> Result<T, Error> {
    let error = match trace(options) {
        Err(error) if has_two_types(&error) => error,
        result => return result,
    };
    if let Some(narrow) = options.narrow(init)? {
        tracing::info!(
            "two types met: the trace is made again, with new tensors in the compute type"
        );
        if let Ok(traced) = trace(&narrow) {
            return Ok(traced);
        }
    }
    Err(error.said_of_types())
}

impl Error {
    /// Returns the error with what is to be done, in place of Burn's word.
    fn said_of_types(self) -> Self {
        match self {
            Self::Uncapturable {
                stage, produced_by, ..
            } => Self::Uncapturable {
                stage,
                produced_by,
                reason: "tensors of two types met in one operation, which Burn refuses; cast what goes into layers that compute \
                         in full (Precision::full_in), and what comes out of them, by `x.cast(..)`, and give tensors that are \
                         made in the loss the type of what they meet"
                    .to_owned(),
            },
            other => other,
        }
    }
}

fn has_two_types(error: &Error) -> bool {
    match error {
        Error::Uncapturable { reason, .. } => reason.contains("DTypeMismatch"),
        _ => false,
    }
}

/// Refuses an operation that a step needs, of a trace in which new tensors are narrow, if more was lost by it than states of
/// zeros lose: one of the module's own, whose tensors (rotations, and their kind) want more bits than activations; numbers of the
/// host; integers, such as targets.
pub(super) fn check_narrow(
    operation: &OperationIr,
    is_of_module: bool,
    constants: &BTreeMap<TensorId, Arc<TensorData>>,
) -> Result<(), Error> {
    let is_half = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
    let reads_constant = operation
        .inputs()
        .any(|input| is_half(input.dtype) && constants.contains_key(&input.id));
    let of_integers = match operation {
        OperationIr::Int(IntOperationIr::IntoFloat(cast)) => is_half(cast.out.dtype),
        _ => false,
    };
    let lost = match (is_of_module, reads_constant, of_integers) {
        (true, ..) => "tensors of the module that are no parameters",
        (_, true, _) => "numbers of the host",
        (.., true) => "integers",
        _ => return Ok(()),
    };
    Err(Error::Uncapturable {
        stage: "the loss",
        produced_by: Some(operation_name(operation)),
        reason: format!(
            "two types met, and with new tensors in the compute type {lost} would lose bits; give each tensor that is made in \
             the loss or in the module a type, by `(&device, dtype)` or `.cast(..)`"
        ),
    })
}
