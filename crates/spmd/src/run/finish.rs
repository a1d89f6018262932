//! The end of a run, and the handling of nodes that only other ranks run.

use std::collections::BTreeSet;

use burn::tensor::{DType, TensorData};
use burn_ir::{BackendIr, CustomOpIr, TensorId, TensorStatus};

use super::executor::Executor;
use crate::error::Error;
use crate::graph::{Graph, Node, Update};
use crate::norm::LOCAL_NORM;

impl<B: BackendIr> Executor<B> {
    /// Frees the inputs that a node would have consumed if this rank ran it.
    pub(super) fn skip(&mut self, node: &Node) {
        let taken = node.operation.inputs();
        let taken = taken.filter(|input| input.status == TensorStatus::ReadWrite);
        let own = taken.map(|input| input.id);
        let own: Vec<TensorId> = own.filter(|id| !self.absent.contains(*id)).collect();
        own.into_iter().for_each(|id| self.free(id));
    }

    /// Returns the call of a custom operation with the operands that this rank has. If it has none of them, the call
    /// must be the norm of gradients: this function writes zero and returns `None`.
    pub(super) fn own_call(&mut self, call: &CustomOpIr) -> Result<Option<CustomOpIr>, Error> {
        let Some(own) = self.absent.without(call) else {
            return Ok(Some(call.clone()));
        };
        if !own.inputs.is_empty() {
            return Ok(Some(own));
        }
        match call.outputs.as_slice() {
            [norm] if call.id == LOCAL_NORM => {
                let zeros = TensorData::zeros::<f32, _>(norm.shape.clone());
                let zeros = zeros.convert_dtype(norm.dtype);
                self.interpreter.register_tensor_data_id(norm.id, zeros);
                Ok(None)
            }
            _ => Err(Error::Internal(format!(
                "{} reads values that other ranks own",
                call.id
            ))),
        }
    }

    /// Applies the graph's updates, and frees results and inputs.
    pub(super) fn finish(&mut self, graph: &Graph) {
        // All at once, because an update may read a value that another update replaces.
        let fresh = |index: usize| TensorId::new(u64::MAX - index as u64);
        let updates = graph.updates().iter();
        let (others, updates): (Vec<&Update>, Vec<&Update>) =
            updates.partition(|update| self.absent.contains(update.from));
        for (index, update) in updates.iter().enumerate() {
            self.interpreter.register_alias(fresh(index), update.from);
            self.table.rename(update.from, fresh(index));
        }
        let sources = updates.iter().map(|update| update.from);
        let ended: BTreeSet<TensorId> = sources.chain(graph.results()).collect();
        for source in ended {
            if !graph.is_given(source) {
                self.free(source);
            }
        }
        for (index, update) in updates.iter().enumerate() {
            self.interpreter.register_alias(update.into, fresh(index));
            self.table.rename(fresh(index), update.into);
            self.free(fresh(index));
            if let Some(value) = graph.value(update.into) {
                let known = (value.shape.clone(), value.dtype);
                self.present.insert(update.into, known);
            }
        }
        for update in others {
            if let Some(value) = graph.value(update.into).filter(|of| !self.has(of.id)) {
                self.set(value.id, nothing(value.dtype));
            }
        }
        for input in graph.inputs() {
            self.remove(*input);
        }
        // Nodes have already freed their memory.
        for id in graph.used_up() {
            if self.absent.contains(id) {
                self.remove(id)
            } else {
                drop(self.present.remove(&id))
            }
        }
    }
}

/// Returns the empty data that this rank holds in place of a tensor that another rank owns.
fn nothing(dtype: DType) -> TensorData {
    TensorData::from_bytes_vec(Vec::new(), [0], dtype)
}
