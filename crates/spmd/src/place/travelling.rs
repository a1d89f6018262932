//! The types in which addends of gradients are sent.

use burn::tensor::DType;
use burn_fsdp_mesh::Placement;
use burn_ir::{BaseOperationIr, CastOpIr, TensorId};

use super::redistribute::Redistribution;
use crate::error::Error;
use crate::graph::{AxisPlacement, Role};

impl Redistribution<'_> {
    /// Like [`run`](Self::run), but addends are sent in the type `travels`, if there is one. Their first sum has the
    /// value's type.
    pub(super) fn run_in(
        &mut self,
        travels: Option<DType>,
        id: TensorId,
        from: &[AxisPlacement],
        to: &[AxisPlacement],
    ) -> Result<TensorId, Error> {
        let mut pairs = from.iter().zip(to);
        let adds = pairs.any(|(from, to)| {
            matches!(from.placement, Placement::Partial(_)) && from.placement != to.placement
        });
        let Some(travels) = travels.filter(|_| adds) else {
            return self.run(id, from, to);
        };
        self.result = Some(self.dtype(id)?);
        let rounded = self
            .graph
            .add_value(self.shape(id)?, travels, Role::Temporary);
        let cast = CastOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(rounded)?,
        };
        self.append(id, BaseOperationIr::Cast(cast))?;
        self.run(rounded, from, to)
    }

    /// Declares the result of a reduction of `addend`.
    pub(super) fn sum(&mut self, shape: Vec<usize>, addend: TensorId) -> Result<TensorId, Error> {
        let dtype = match self.result {
            Some(wide) => wide,
            None => self.dtype(addend)?,
        };
        Ok(self.graph.add_value(shape, dtype, Role::Temporary))
    }
}
