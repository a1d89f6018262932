//! The type of tensors that a model creates without specifying one.
//!
//! Burn gives them the device's default type. Recurrent layers create their first states and their output tensor this
//! way, and would mix two types if parameters have 16 bits.

use burn::module::Module;
use burn::tensor::Device;

use super::options::TraceOptions;
use super::parameters::parameters_with;
use crate::error::Error;

impl TraceOptions {
    /// Returns true if new tensors have the parameters' compute type.
    pub(super) fn is_narrow(&self) -> bool {
        !self.stored.is_empty()
    }

    /// Returns the options for a trace in which new tensors have the parameters' compute type; `None` if they already
    /// have it.
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

/// Returns the result of `trace`. If an operation would mix two types, calls `trace` again with new tensors in the
/// parameters' compute type. If that also fails, returns the first error.
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
            "two types met, so the step is traced again with new tensors in the compute type"
        );
        if let Ok(traced) = trace(&narrow) {
            return Ok(traced);
        }
    }
    Err(error.said_of_types())
}

impl Error {
    /// Replaces Burn's message in the error with instructions.
    fn said_of_types(self) -> Self {
        match self {
            Self::Uncapturable {
                stage, produced_by, ..
            } => Self::Uncapturable {
                stage,
                produced_by,
                reason: "tensors of two types met in one operation, which Burn refuses; cast the inputs and outputs of \
                    layers in full precision (Precision::full_in) with `x.cast(..)`, and give tensors that are created \
                    in the loss the type of the tensors they meet"
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
