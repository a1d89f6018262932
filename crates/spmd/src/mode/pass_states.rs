//! The tensors that the user's passes keep from step to step.

use super::Mode;
use crate::error::Error;
use crate::graph::Graph;
use crate::trace::ParameterSpec;
use crate::transform::PassState;

impl Mode {
    /// Returns the states of the user's passes, in order.
    pub(crate) fn pass_states(&self) -> Vec<PassState> {
        let mut states = Vec::new();
        for transform in &self.user.transforms {
            transform.states(&mut states);
        }
        states
    }

    /// Returns the specs of the states of the user's passes.
    pub(crate) fn pass_state_specs(&self) -> Vec<ParameterSpec> {
        let states = self.pass_states().into_iter();
        let specs = states.map(|PassState { path, initial }| ParameterSpec {
            path: path.into(),
            tied: Vec::new(),
            shape: initial.shape().to_vec(),
            dtype: initial.dtype(),
            is_trained: false,
            is_buffer: true,
            is_added: true,
        });
        specs.collect()
    }

    /// Declares the states of the user's passes in a traced step.
    ///
    /// # Errors
    ///
    /// [`Error::DuplicateName`] if the module or another pass has a tensor of the same path.
    pub(super) fn declare_pass_states(&self, graph: &mut Graph) -> Result<(), Error> {
        for (number, spec) in self.pass_state_specs().into_iter().enumerate() {
            if graph.parameter(&spec.path).is_some() {
                return Err(Error::DuplicateName {
                    what: "parameter, buffer or state of a pass",
                    name: spec.path.to_string(),
                });
            }
            graph.add_pass_state(number, spec.path, (spec.shape, spec.dtype));
        }
        Ok(())
    }
}
