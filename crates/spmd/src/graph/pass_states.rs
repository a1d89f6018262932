//! The states of a user's passes in a graph.

use std::sync::Arc;

use burn::tensor::DType;
use burn_fsdp_mesh::Layout;
use burn_ir::TensorId;

use super::{Graph, Parameter, Role, Value};

/// First id of the states of passes. All graphs of a step use the same ids, after the ids of pending values.
const FIRST: u64 = 1 << 42;

impl Graph {
    /// Declares the state of a pass after the module's tensors. `number` is its position among the states.
    pub(crate) fn add_pass_state(
        &mut self,
        number: usize,
        path: Arc<str>,
        (shape, dtype): (Vec<usize>, DType),
    ) {
        let id = TensorId::new(FIRST + number as u64);
        let value = Value::new(id, shape.clone(), dtype, Role::PassState(path.clone()));
        // Without `insert_value`: other new values must not get ids from this range.
        self.values.insert(id, value);
        self.parameters.push(Parameter {
            path,
            value: id,
            shape,
            dtype,
            layout: Layout::one_rank(),
            gradient: None,
            states: Vec::new(),
            whole_states: Vec::new(),
            state_format: None,
            is_buffer: true,
        });
    }
}
