//! The values that a step holds when it begins: initial values, restored states, and states in 32 bits.

use std::sync::Arc;

use burn::tensor::TensorData;
use burn_fsdp_mesh::Region;
use burn_ir::BackendIr;

use super::restored::{divided, state_of};
use super::step::CompiledStep;
use crate::error::Error;
use crate::graph::{Graph, Parameter};
use crate::low_bit;
use crate::trace::Batch;

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Passes the initial values and the restored states to the executor before a graph runs.
    pub(super) fn begin(&mut self, graph: &Arc<Graph>) -> Result<(), Error> {
        // A mismatch is found before anything is set.
        let places = self.places(graph)?;
        if let Some(initial) = self.initial.take() {
            let values = initial.into_values(graph, self.mode.ranks());
            for (id, data) in values.inspect_err(|error| self.poison(error))? {
                self.executor.set(id, data);
            }
        }
        let restored = self.restore(&places);
        restored.inspect_err(|error| self.poison(error))?;
        self.current = Some(graph.clone());
        Ok(())
    }

    /// Returns the graph's values for the restored states, in the same order. Rejects a mismatch of shape or type.
    fn places(&self, graph: &Graph) -> Result<Vec<Parameter>, Error> {
        let places = self.restored.iter().map(|((path, slot), data)| {
            let place = state_of(graph, path, self.scalars.slots(path), slot)?;
            if !self.scalars.has_tensor(path, slot) {
                let what =
                    format!("the number of steps for state {path} {slot} (resume, resume_with)");
                return Err(Error::Missing { what });
            }
            data.check(&place, slot, self.mode.ranks())?;
            Ok(place)
        });
        places.collect()
    }

    /// Moves the restored states into these values of the graph. All ranks must call it if the graph divides them
    /// differently.
    fn restore(&mut self, places: &[Parameter]) -> Result<(), Error> {
        let restored = std::mem::take(&mut self.restored).into_iter();
        for (place, ((_, slot), data)) in places.iter().zip(restored) {
            let mut local = data.into_local(place, self.mode.ranks())?;
            if let Some(format) = place.state_format {
                let start = self.start_of(place)?;
                local = low_bit::stored(&local, format, &slot, start);
            }
            self.executor.set(place.value, local);
        }
        Ok(())
    }

    /// Returns the flat index of this rank's first element of a state.
    fn start_of(&self, place: &Parameter) -> Result<usize, Error> {
        let (mesh, rank) = (self.mesh()?, self.rank());
        if place.layout.is_whole() {
            return Ok(0);
        }
        Ok(match place.layout.region(&place.shape, &mesh, rank)? {
            Region::Flat(range) => range.start,
            Region::Box { .. } => 0,
        })
    }

    /// Returns this rank's padded part of an optimizer state, in the type in which the optimizer computes.
    pub(super) fn held_state(&mut self, place: &Parameter) -> Result<TensorData, Error> {
        let local = self.executor.get(place.value)?;
        let Some(format) = place.state_format else {
            return Ok(local);
        };
        let shape = match divided(place, self.mode.ranks()).partition()? {
            _ if local.num_elements() == 0 => vec![0],
            Some(partition) if place.layout.owner.is_none() => vec![partition.chunk_len()],
            _ => place.shape.clone(),
        };
        Ok(low_bit::loaded(&local, format, &shape))
    }
}
