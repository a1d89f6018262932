//! Operations on values with padded parts: they are padded before they are sharded, cleared before they are summed, and
//! trimmed after they are gathered.

use std::sync::Arc;

use burn::tensor::{BoolStore, DType, TensorData};
use burn_ir::{BaseOperationIr as Base, CatOpIr, MaskFillOpIr, ScalarIr, ShapeOpIr, TensorId};

use super::located::on;
use super::padding::Mask;
use super::redistribute::Redistribution;
use crate::error::Error;
use crate::graph::{AxisPlacement, AxisShift, Role};

impl Redistribution<'_> {
    /// Pads a dim that will be sharded on an axis to a multiple of the number of ranks.
    pub(super) fn lengthened(
        &mut self,
        id: TensorId,
        (now, axis): (&[AxisPlacement], usize),
        dim: usize,
    ) -> Result<TensorId, Error> {
        let mut shape = self.shape(id)?;
        let missing = shape[dim].next_multiple_of(now[axis].num_ranks) - shape[dim];
        if missing == 0 {
            return Ok(id);
        }
        let first = self.taken(id, dim, None, missing)?;
        shape[dim] += missing;
        let out = self.temporary(shape, id)?;
        let op = Base::Cat(CatOpIr {
            tensors: vec![self.graph.read(id)?, self.graph.read(first)?],
            dim,
            out: self.graph.write(out)?,
        });
        self.append(id, op)?;
        self.padding.lengthened.insert(out, on(now));
        Ok(out)
    }

    /// Removes the padding of a dim that has been gathered.
    pub(super) fn trimmed(&mut self, id: TensorId, dim: usize) -> Result<TensorId, Error> {
        if self.shape(id)?[dim] == self.whole[dim] {
            Ok(id)
        } else {
            self.taken(id, dim, None, self.whole[dim])
        }
    }

    /// Sets the padding of a sharded value to zero.
    pub(super) fn cleared(
        &mut self,
        id: TensorId,
        axis: &AxisPlacement,
        dim: usize,
    ) -> Result<TensorId, Error> {
        let key = (id, dim, self.reader.clone());
        if let Some(cleared) = self.padding.cleared.get(&key) {
            return Ok(*cleared);
        }
        let part = self.shape(id)?;
        let mask = self.mask(axis, &part, dim)?;
        let out = self.temporary(part, id)?;
        let tensor = self.graph.read(id)?;
        let value = match tensor.dtype {
            DType::Bool(_) => ScalarIr::Bool(false),
            dtype if dtype.is_float() => ScalarIr::Float(0.0),
            dtype if dtype.is_uint() => ScalarIr::UInt(0),
            _ => ScalarIr::Int(0),
        };
        let op = Base::MaskFill(MaskFillOpIr {
            tensor,
            mask: self.graph.read(mask)?,
            value,
            out: self.graph.write(out)?,
        });
        self.append(id, op)?;
        self.padding.cleared.insert(key, out);
        Ok(out)
    }

    /// Returns a mask of each rank's part, true for the padding along a dim.
    fn mask(
        &mut self,
        axis: &AxisPlacement,
        part: &[usize],
        dim: usize,
    ) -> Result<TensorId, Error> {
        let (len, size) = (part[dim], self.whole[dim]);
        let of = Mask {
            axis: axis.axis.clone(),
            part: part.to_vec(),
            dim,
            size,
            reader: self.reader.clone(),
        };
        if let Some(mask) = self.padding.masks.get(&of) {
            return Ok(*mask);
        }
        let all = (0..len * axis.num_ranks).map(|at| at >= size);
        let all = TensorData::new(all.collect::<Vec<bool>>(), [len * axis.num_ranks]);
        let bool_type = DType::Bool(BoolStore::Native);
        let mask = self
            .graph
            .add_value(all.shape().to_vec(), bool_type, Role::Constant);
        self.graph.insert_constant(mask, Arc::new(all));
        let shift = AxisShift {
            axis: axis.axis.clone(),
            dim: 0,
            len,
        };
        let mask = self.taken(mask, 0, Some(shift), len)?;
        let mut aligned = vec![1; part.len()];
        aligned[dim] = len;
        let mask = self.reshape(mask, aligned)?;
        let mask = self.expanded(mask, part.to_vec())?;
        self.padding.masks.insert(of, mask);
        Ok(mask)
    }

    fn expanded(&mut self, id: TensorId, shape: Vec<usize>) -> Result<TensorId, Error> {
        let out = self.temporary(shape, id)?;
        let op = Base::Expand(ShapeOpIr {
            input: self.graph.read(id)?,
            out: self.graph.write(out)?,
        });
        self.append(id, op)?;
        Ok(out)
    }
}
