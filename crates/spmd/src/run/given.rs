//! The values that no node of a graph writes: parameters, inputs and constants.

use burn::tensor::{DType, Shape, TensorData};
use burn_fsdp_tensors as tensors;
use burn_ir::{BackendIr, HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};

use super::executor::Executor;
use super::memory::Address;
use crate::error::Error;

impl<B: BackendIr> Executor<B> {
    /// Sets a given value: one that no node writes, such as a parameter or an input.
    pub fn set(&mut self, id: TensorId, data: TensorData) {
        let known = (data.shape().to_vec(), data.dtype());
        self.table.remove(id);
        self.seals.remove(id);
        self.interpreter.register_tensor_data_id(id, data);
        self.present.insert(id, known);
        self.count(id);
    }

    /// Sets a given value of this shape and type to a tensor, without a copy.
    pub(crate) fn lend(&mut self, id: TensorId, tensor: HandleKind<B>, spec: (Vec<usize>, DType)) {
        self.table.remove(id);
        self.seals.remove(id);
        self.interpreter.register_tensor_to_device(id, tensor);
        self.present.insert(id, spec);
        self.count(id);
    }

    /// Returns true if a given value is set.
    pub fn has(&self, id: TensorId) -> bool {
        self.present.contains_key(&id)
    }

    /// Reads a given value back to the host.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], or [`Error::Internal`] if the backend cannot be read.
    pub fn get(&mut self, id: TensorId) -> Result<TensorData, Error> {
        match self.present.get(&id).cloned() {
            Some(spec) => self.read(id, spec, TensorStatus::ReadOnly),
            None => Err(missing(id)),
        }
    }

    /// Removes a given value, and reads it back to the host. The CPU backend copies only memory that others also have.
    ///
    /// # Errors
    ///
    /// Same as [`get`](Self::get).
    pub(crate) fn take(&mut self, id: TensorId) -> Result<TensorData, Error> {
        let spec = self.present.remove(&id).ok_or_else(|| missing(id))?;
        self.table.remove(id);
        self.seals.remove(id);
        self.read(id, spec, TensorStatus::ReadWrite)
    }

    /// Reads a value of this shape and type back to the host, and frees it if its status is to be read and written.
    pub(super) fn read(
        &mut self,
        id: TensorId,
        (shape, dtype): (Vec<usize>, DType),
        status: TensorStatus,
    ) -> Result<TensorData, Error> {
        self.read_tensor(&TensorIr {
            id,
            shape: Shape::from(shape),
            status,
            dtype,
        })
    }

    /// Reads a value back to the host, and frees it if its status is to be read and written.
    pub(super) fn read_tensor(&mut self, tensor: &TensorIr) -> Result<TensorData, Error> {
        tensors::read(self.interpreter.get_tensor(tensor)).map_err(Error::Internal)
    }

    /// Frees a given value.
    pub fn remove(&mut self, id: TensorId) {
        if self.present.remove(&id).is_some() {
            self.free(id);
        }
    }

    pub(super) fn free(&mut self, id: TensorId) {
        self.table.remove(id);
        self.seals.remove(id);
        let tensor = TensorIr {
            id,
            shape: Shape::from(vec![0]),
            status: TensorStatus::ReadWrite,
            dtype: DType::F32,
        };
        self.interpreter.register_op(OperationIr::Drop(tensor));
    }

    pub(super) fn count(&mut self, id: TensorId) {
        let Some((shape, dtype)) = self.present.get(&id) else {
            return;
        };
        let tensor = TensorIr {
            id,
            shape: Shape::from(shape.clone()),
            status: TensorStatus::ReadOnly,
            dtype: *dtype,
        };
        let handle = self.interpreter.get_tensor(&tensor);
        let place = Address::of::<B>(id, &handle);
        self.table.insert(id, place);
    }
}

fn missing(id: TensorId) -> Error {
    Error::Missing {
        what: format!("value {}", id.value()),
    }
}
