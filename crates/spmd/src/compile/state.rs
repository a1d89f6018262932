//! What a step holds between two calls, in the parts in which this rank holds it: for checkpoints.

use burn::tensor::TensorData;
use burn_fsdp_mesh::Mesh;
use burn_ir::{BackendIr, TensorId};
use burn_pack::Scalar;

use super::{CompiledStep, slice};
use crate::Error;
use crate::graph::{Parameter, ParameterLayout, Role};
use crate::mode::Mode;
use crate::place::local_shape;
use crate::trace::Batch;

/// A state that was set before there was a graph.
#[derive(Debug)]
pub(super) enum Restored {
    /// Of all ranks.
    Whole(TensorData),
    /// This rank's part, without padding.
    Part(TensorData),
}

impl Restored {
    /// As this rank holds it in a graph.
    pub(super) fn into_local(
        self,
        parameter: &Parameter,
        slot: &str,
        mode: &Mode,
    ) -> Result<TensorData, Error> {
        let (shape, data) = match &self {
            Self::Whole(data) => (parameter.shape.clone(), data),
            Self::Part(data) => (part_shape(&parameter.shape, &parameter.layout, mode), data),
        };
        if data.shape().to_vec() != shape || data.dtype() != parameter.dtype {
            return Err(Error::mismatch(
                "optimizer state",
                format!("{} {slot}", parameter.path),
                (&shape, parameter.dtype),
                data,
            ));
        }
        Ok(match self {
            Self::Whole(data) => super::localize(&data, &parameter.layout, mode)?,
            Self::Part(data) => padded(data, &parameter.layout),
        })
    }
}

/// A part as tensors hold it.
pub(crate) fn padded(data: TensorData, layout: &ParameterLayout) -> TensorData {
    match layout {
        ParameterLayout::Whole | ParameterLayout::Placed(_) => data,
        ParameterLayout::Flat(partition) => {
            let dtype = data.dtype();
            let mut bytes = data.as_bytes().to_vec();
            bytes.resize(partition.chunk_len() * dtype.size(), 0);
            TensorData::from_bytes_vec(bytes, [partition.chunk_len()], dtype)
        }
    }
}

/// A part without its padding.
pub(super) fn unpadded(data: TensorData, layout: &ParameterLayout, mode: &Mode) -> TensorData {
    match layout {
        ParameterLayout::Whole | ParameterLayout::Placed(_) => data,
        ParameterLayout::Flat(partition) => slice(&data, 0..partition.len(mode.group.rank())),
    }
}

/// Shape of this rank's part of a tensor, without padding.
fn part_shape(shape: &[usize], layout: &ParameterLayout, mode: &Mode) -> Vec<usize> {
    match layout {
        ParameterLayout::Whole => shape.to_vec(),
        ParameterLayout::Flat(partition) => vec![partition.len(mode.group.rank())],
        ParameterLayout::Placed(placements) => local_shape(shape, placements),
    }
}

impl<B: Batch, Be: BackendIr> CompiledStep<B, Be> {
    /// How the ranks divide a parameter or buffer, its gradient and its states.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub fn layout(&self, path: &str) -> Result<ParameterLayout, Error> {
        self.spec(path)?;
        match &self.initial {
            Some(initial) => Ok(initial.layout(path)?.clone()),
            None => Ok(self.located(path)?.0.layout),
        }
    }

    /// The mesh of the step's ranks: one axis, `data`, in data parallelism.
    ///
    /// # Errors
    ///
    /// None that a mode that was made can have.
    pub fn mesh(&self) -> Result<Mesh, Error> {
        self.mode.mesh()
    }

    /// This rank's number among those of the mesh.
    pub fn rank(&self) -> usize {
        self.mode.group.rank()
    }

    /// Sets this rank's part of a parameter or buffer, in the shape that [`shard`](Self::shard) gives.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; [`Error::TensorMismatch`] if it has another shape or type.
    pub fn set_shard(&mut self, path: &str, data: TensorData) -> Result<(), Error> {
        self.flush()?;
        let layout = self.layout(path)?;
        let spec = self.spec(path)?;
        let shape = part_shape(&spec.shape, &layout, &self.mode);
        if data.shape().to_vec() != shape || data.dtype() != spec.dtype {
            let expected = (shape.as_slice(), spec.dtype);
            return Err(Error::mismatch("shard", path.to_owned(), expected, &data));
        }
        let local = padded(data, &layout);
        if let Some(initial) = &mut self.initial {
            return initial.set_local(path, local);
        }
        let (_, value) = self.located(path)?;
        self.executor.set(value, local);
        Ok(())
    }

    /// This rank's part of the optimizer's states of a parameter, by name; empty before the first step.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub fn state_shards(&mut self, path: &str) -> Result<Vec<(String, TensorData)>, Error> {
        self.flush()?;
        let layout = self.layout(path)?;
        // What was set since the last step is what the next begins with.
        let set = self.restored.iter().filter(|((of, _), _)| of == path);
        let set = set.map(|((_, slot), data)| {
            let part = match data {
                Restored::Part(data) => data.clone(),
                Restored::Whole(data) => unpadded(
                    super::localize(data, &layout, &self.mode)?,
                    &layout,
                    &self.mode,
                ),
            };
            Ok((slot.clone(), part))
        });
        let set = set.collect::<Result<Vec<_>, Error>>()?;
        if !set.is_empty() || self.current.is_none() {
            return Ok(set);
        }
        let (parameter, _) = self.located(path)?;
        let mut states = Vec::new();
        for (id, slot) in self.slots(&parameter) {
            if self.executor.has(id) {
                let local = self.executor.get(id)?;
                states.push((slot, unpadded(local, &layout, &self.mode)));
            }
        }
        Ok(states)
    }

    fn slots(&self, parameter: &Parameter) -> Vec<(TensorId, String)> {
        let graph = self.current.as_ref();
        let role = |id| graph.and_then(|graph| graph.value(id)).map(|v| &v.role);
        let slots = parameter.states.iter().filter_map(|id| match role(*id) {
            Some(Role::State { slot, .. }) => Some((*id, slot.to_string())),
            _ => None,
        });
        slots.collect()
    }

    /// Sets this rank's part of a state of the optimizer, under the name and in the shape that
    /// [`state_shards`](Self::state_shards) gives.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for the path. A slot that does not exist, or data of another shape or type,
    /// is found by the next step.
    pub fn set_state_shard(
        &mut self,
        path: &str,
        slot: &str,
        data: TensorData,
    ) -> Result<(), Error> {
        self.spec(path)?;
        self.flush()?;
        let key = (path.to_owned(), slot.to_owned());
        self.restored.insert(key, Restored::Part(data));
        Ok(())
    }

    /// The numbers of the optimizer's state, such as its step counter, which are equal for all
    /// parameters; empty before the first step.
    pub fn counters(&self) -> Vec<(String, Scalar)> {
        self.scalars.counters()
    }

    /// Continues a run after that many steps, with the numbers that [`counters`](Self::counters) gave
    /// then. Every state must be set before the next step.
    ///
    /// # Errors
    ///
    /// [`Error::UntraceableOptimizer`] if the optimizer's state has other numbers.
    pub fn resume_with(&mut self, steps: u64, counters: &[(String, Scalar)]) -> Result<(), Error> {
        self.scalars.set_counters(counters)?;
        self.steps = steps;
        Ok(())
    }
}
