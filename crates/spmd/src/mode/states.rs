//! Optimizer states that are kept in fewer bits.

use burn_fsdp_tensors::StateFormat;

use super::Mode;
use crate::error::Error;
use crate::graph::{Graph, Parameter};
use crate::trace::ParameterSpec;

impl Mode {
    /// Sets the parameters whose optimizer states are kept in fewer bits.
    pub(crate) fn keep_states(
        &mut self,
        specs: &[ParameterSpec],
        format: impl Fn(&str) -> Option<StateFormat>,
    ) {
        let states = specs.iter();
        let states = states.filter_map(|spec| Some((spec.path.clone(), format(&spec.path)?)));
        self.names.states = states.collect();
    }

    /// Declares the formats of states in a graph without an optimizer, so it divides parameters as the step does.
    pub(crate) fn declare_states(&self, graph: &mut Graph) {
        for parameter in graph.parameters_mut() {
            parameter.state_format = self.names.states.get(&parameter.path).copied();
        }
    }

    /// Rejects states in fewer bits if values are divided by placements.
    pub(super) fn check_states(&self, parameters: &[&Parameter]) -> Result<(), Error> {
        let rounded = |parameter: &&&Parameter| parameter.state_format.is_some();
        match parameters.iter().find(rounded) {
            Some(parameter) if self.division.is_placed() => Err(Error::Placement {
                what: "parameter",
                name: parameter.path.to_string(),
                placement: "with optimizer states in fewer bits (LowBitOptimizer)".to_owned(),
                shape: parameter.shape.clone(),
                reason: "they require Mode::data_parallel or Mode::hybrid, but this step divides every value by \
                    placements, which may cut blocks of elements that share a scale"
                    .to_owned(),
            }),
            _ => Ok(()),
        }
    }
}
