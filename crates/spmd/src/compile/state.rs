//! Access to the parameters and optimizer states that a step holds between two calls, either whole or as this rank's
//! part.

use std::collections::BTreeMap;
use std::iter;

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{DType, TensorData};
use burn_fsdp_mesh::{Layout, Mesh};
use burn_ir::{BackendIr, TensorId};
use burn_pack::Scalar;

use super::idle::IdleState;
use super::restored::{Restored, divided, state_of};
use super::step::CompiledStep;
use crate::error::Error;
use crate::graph::{Parameter, Role};
use crate::parts::Divided;
use crate::trace::{Batch, ParameterSpec};

/// This rank's part of one parameter's optimizer state.
#[derive(Debug, Clone)]
pub struct OptimizerState {
    /// Path of the parameter.
    pub path: String,
    /// Numbers of the state, as [`CompiledStep::counters`] returns them.
    pub counters: Vec<(String, Scalar)>,
    /// All tensors of the state, as [`CompiledStep::state_shards`] returns them.
    pub tensors: Vec<(String, TensorData)>,
}

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Returns the states of parameters that this step does not train, as set by
    /// [`set_idle_states`](Self::set_idle_states).
    pub fn idle_states(&self) -> &[IdleState] {
        &self.done.idle
    }

    /// Replaces the states of parameters that this step does not train.
    pub fn set_idle_states(&mut self, states: Vec<IdleState>) {
        self.done.idle = states;
    }

    /// Returns a whole parameter or buffer. All ranks must call it, and all receive the tensor. In data parallelism,
    /// each rank receives its own running statistics, which cover only its rows.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`], [`Error::Collective`]; the errors of [`flush`](Self::flush).
    pub fn parameter(&mut self, path: &str) -> Result<TensorData, Error> {
        let path = &*self.spec(path)?.path.clone();
        self.flush()?;
        if let Some(initial) = &self.initial {
            return initial.whole(path, self.mode.ranks());
        }
        let (parameter, value) = self.located(path)?;
        let local = self.executor.get(value)?;
        self.whole(&parameter, &local)
    }

    /// Returns this rank's part of a parameter: all of it, a flat shard without padding, or a part along the cut dims.
    ///
    /// A state of another float type is converted, if that changes no value: Burn reads states of 16 bits in 32.
    ///
    /// It first completes the last step. If collectives were [moved](crate::Mode::move_to_next_iteration), all ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; the errors of [`flush`](Self::flush).
    pub fn shard(&mut self, path: &str) -> Result<TensorData, Error> {
        let path = &*self.spec(path)?.path.clone();
        self.flush()?;
        if let Some(initial) = &self.initial {
            let (shape, layout) = (&self.spec(path)?.shape, initial.layout(path)?);
            return self.divided(shape, layout).unpadded(initial.local(path)?);
        }
        let (parameter, value) = self.located(path)?;
        let local = self.executor.get(value)?;
        divided(&parameter, self.mode.ranks()).unpadded(local)
    }

    /// Sets a whole parameter or buffer. Every rank must call it with the same data.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; [`Error::TensorMismatch`] if it has a different shape or type; the errors of
    /// [`flush`](Self::flush).
    pub fn set_parameter(&mut self, path: &str, data: TensorData) -> Result<(), Error> {
        self.flush()?;
        let spec = self.spec(path)?;
        if data.shape().to_vec() != spec.shape || data.dtype() != spec.dtype {
            return Err(Error::mismatch(
                "parameter",
                path.to_owned(),
                (&spec.shape, spec.dtype),
                &data,
            ));
        }
        let path = &*spec.path.clone();
        if let Some(initial) = &mut self.initial {
            return initial.set(path, data, self.mode.ranks());
        }
        let (parameter, value) = self.located(path)?;
        let local = divided(&parameter, self.mode.ranks()).localize(&data)?;
        self.executor.set(value, local);
        Ok(())
    }

    /// Returns the whole optimizer states of a parameter, by name; empty before the first step. All ranks must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`], [`Error::Collective`]; the errors of [`flush`](Self::flush).
    pub fn states(&mut self, path: &str) -> Result<Vec<(String, TensorData)>, Error> {
        let path = &*self.spec(path)?.path.clone();
        self.flush()?;
        let Some(graph) = self.current.clone() else {
            return Ok(Vec::new());
        };
        let (parameter, _) = self.located(path)?;
        let mut states = Vec::new();
        for (id, slot) in self.slots(&parameter) {
            if self.executor.has(id) && self.scalars.has_tensor(path, &slot) {
                let place = state_of(&graph, path, self.scalars.slots(path), &slot)?;
                let local = self.held_state(&place)?;
                states.push((slot, self.whole(&place, &local)?));
            }
        }
        Ok(states)
    }

    /// Resumes a run after `steps` steps at these learning rates. Each step must have trained every parameter. The
    /// optimizer's counters are set as after these steps. Every state must be set with [`set_state`](Self::set_state)
    /// before the next step. See [`resume_with`](Self::resume_with) for a run whose rates or trained parameters
    /// changed, or with [skipped](Self::was_skipped) steps.
    ///
    /// # Errors
    ///
    /// [`Error::Backwards`] if more steps were already done; [`Error::UntraceableOptimizer`].
    pub fn resume(
        &mut self,
        steps: u64,
        rates: impl Into<ModuleLearningRate>,
    ) -> Result<(), Error> {
        let rates = rates.into();
        let done = self.done.steps;
        if steps < done {
            return Err(Error::Backwards { done, steps });
        }
        for _ in self.done.steps..steps {
            let step = self.scalars.peek(&rates)?;
            self.scalars.advance(&step, |_| true);
        }
        self.done.steps = steps;
        Ok(())
    }

    /// Sets a whole optimizer state, under the name that [`states`](Self::states) returns. Every rank must call it with
    /// the same data.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for the path; the errors of [`flush`](Self::flush). The next step reports a slot that
    /// does not exist, or data of a different shape or type.
    pub fn set_state(&mut self, path: &str, slot: &str, data: TensorData) -> Result<(), Error> {
        let path = &*self.spec(path)?.path.clone();
        self.flush()?;
        let key = (path.to_owned(), slot.to_owned());
        self.restored.insert(key, Restored::Whole(data));
        Ok(())
    }

    fn whole(&self, parameter: &Parameter, local: &TensorData) -> Result<TensorData, Error> {
        divided(parameter, self.mode.ranks()).whole(&parameter.path, local)
    }

    fn divided<'a>(&'a self, shape: &'a [usize], layout: &'a Layout) -> Divided<'a> {
        let ranks = self.mode.ranks();
        Divided {
            shape,
            layout,
            ranks,
        }
    }

    fn spec(&self, path: &str) -> Result<&ParameterSpec, Error> {
        let is_it = |spec: &&ParameterSpec| {
            let mut paths = iter::once(&spec.path).chain(&spec.tied);
            paths.any(|known| **known == *path)
        };
        let found = self.specs.iter().find(is_it);
        found.ok_or_else(|| {
            let known = self.specs.iter().take(8).map(|spec| spec.path.as_ref());
            Error::UnknownName {
                what: "parameter",
                name: path.to_owned(),
                known: known.collect::<Vec<_>>().join(", "),
            }
        })
    }

    fn located(&self, path: &str) -> Result<(Parameter, TensorId), Error> {
        let graph = self.current.as_ref();
        let parameter = graph.and_then(|graph| graph.parameter(path)).cloned();
        let parameter =
            parameter.ok_or_else(|| Error::Internal(format!("parameter {path} is in no graph")))?;
        let value = parameter.value;
        Ok((parameter, value))
    }

    /// Returns the layout of a parameter or buffer, which its gradient shares; [`state_place`](Self::state_place)
    /// returns the layout of a state. With [`DataParallel::Automatic`](crate::DataParallel::Automatic), it is the
    /// layout of flat shards until the first graph decides the placements.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub fn layout(&self, path: &str) -> Result<Layout, Error> {
        let path = &*self.spec(path)?.path.clone();
        match &self.initial {
            Some(initial) => Ok(initial.layout(path)?.clone()),
            None => Ok(self.located(path)?.0.layout),
        }
    }

    /// Returns the mesh of the step's ranks: one axis, `data`, in data parallelism.
    ///
    /// # Errors
    ///
    /// Never fails for a mode that was created successfully.
    pub fn mesh(&self) -> Result<Mesh, Error> {
        self.mode.ranks().mesh()
    }

    /// Returns this rank's number on the mesh.
    pub fn rank(&self) -> usize {
        self.mode.ranks().rank()
    }

    /// Sets this rank's part of a parameter or buffer, in the shape that [`shard`](Self::shard) returns.
    ///
    /// It first completes the last step. If collectives were [moved](crate::Mode::move_to_next_iteration), all ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; [`Error::TensorMismatch`] if it has a different shape or type; the errors of
    /// [`flush`](Self::flush).
    pub fn set_shard(&mut self, path: &str, data: TensorData) -> Result<(), Error> {
        self.flush()?;
        self.check_shard(path, &data)?;
        let layout = self.layout(path)?;
        let local = self
            .divided(&self.spec(path)?.shape, &layout)
            .padded(data)?;
        if let Some(initial) = &mut self.initial {
            return initial.set_local(path, local);
        }
        let (_, value) = self.located(path)?;
        self.executor.set(value, local);
        Ok(())
    }

    /// Returns this rank's part of a parameter's optimizer states, by name, including states that were set since the
    /// last step.
    ///
    /// It first completes the last step. If collectives were [moved](crate::Mode::move_to_next_iteration), all ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; the errors of [`flush`](Self::flush).
    pub fn state_shards(&mut self, path: &str) -> Result<Vec<(String, TensorData)>, Error> {
        self.flush()?;
        let mut states = BTreeMap::new();
        if self.current.is_some() {
            let (parameter, _) = self.located(path)?;
            for (id, slot) in self.slots(&parameter) {
                if self.executor.has(id) && self.scalars.has_tensor(path, &slot) {
                    let (shape, layout) = self.state_place(path, &slot)?;
                    let place = Parameter {
                        value: id,
                        shape: shape.clone(),
                        layout: layout.clone(),
                        ..parameter.clone()
                    };
                    let local = self.held_state(&place)?;
                    states.insert(slot, self.divided(&shape, &layout).unpadded(local)?);
                }
            }
        }
        // The next step begins with the states set since the last step.
        for ((of, slot), data) in &self.restored {
            if of != path {
                continue;
            }
            let part = match data {
                Restored::Part(data, _) => data.clone(),
                Restored::Whole(data) => {
                    let (shape, layout) = self.state_place(path, slot)?;
                    let divided = self.divided(&shape, &layout);
                    divided.unpadded(divided.localize(data)?)?
                }
            };
            states.insert(slot.clone(), part);
        }
        Ok(states.into_iter().collect())
    }

    /// Returns the shape of a whole optimizer state, and its layout. A state of the parameter's shape is divided like
    /// the parameter, and any other is whole. All states of a parameter that one rank owns are on that rank.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub fn state_place(&self, path: &str, slot: &str) -> Result<(Vec<usize>, Layout), Error> {
        let spec = self.spec(path)?;
        let slots = self.scalars.slots(path);
        let Some(found) = slots.iter().find(|other| *other.name == *slot) else {
            let known: Vec<_> = slots.iter().map(|slot| slot.name.as_ref()).collect();
            return Err(Error::UnknownName {
                what: "optimizer state",
                name: format!("{path} {slot}"),
                known: known.join(", "),
            });
        };
        let own = self.layout(path)?;
        let layout = if found.shape == spec.shape || own.owner.is_some() {
            own
        } else {
            Layout::one_rank()
        };
        Ok((found.shape.clone(), layout))
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

    /// Sets this rank's part of an optimizer state, under the name and in the shape that
    /// [`state_shards`](Self::state_shards) returns.
    ///
    /// It first completes the last step. If collectives were [moved](crate::Mode::move_to_next_iteration), all ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for the path; the errors of [`flush`](Self::flush). The next step reports a slot that
    /// does not exist, or data of a different shape or type.
    pub fn set_state_shard(
        &mut self,
        path: &str,
        slot: &str,
        data: TensorData,
    ) -> Result<(), Error> {
        let path = &*self.spec(path)?.path.clone();
        self.flush()?;
        let layout = match self.state_place(path, slot) {
            Ok((_, layout)) => layout,
            Err(_) => self.layout(path)?,
        };
        let key = (path.to_owned(), slot.to_owned());
        self.restored.insert(key, Restored::of(data, &layout));
        Ok(())
    }

    /// Returns this rank's part of a whole optimizer state, for [`resume_with`](Self::resume_with). Not collective.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`] for a parameter or state that the step does not have.
    pub fn part_of_state(
        &self,
        path: &str,
        slot: &str,
        whole: &TensorData,
    ) -> Result<TensorData, Error> {
        let (shape, layout) = self.state_place(path, slot)?;
        let place = self.divided(&shape, &layout);
        place.unpadded(place.localize(whole)?)
    }

    /// Returns the named numbers of a parameter's optimizer state, such as its step counter; `None` before its first
    /// step.
    pub fn counters(&self, path: &str) -> Option<&[(String, Scalar)]> {
        self.scalars.counters(path)
    }

    /// Continues a run after `steps` steps, with the optimizer's states at that point. Trained parameters without a
    /// state have not been updated yet.
    ///
    /// It first completes the last step. If collectives were [moved](crate::Mode::move_to_next_iteration), all ranks
    /// must call it.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`], [`Error::TensorMismatch`], [`Error::UntraceableOptimizer`] for a state that does not
    /// belong to this optimizer, or is incomplete. No state is changed in that case. Also the errors of
    /// [`flush`](Self::flush).
    pub fn resume_with(
        &mut self,
        steps: u64,
        mut states: Vec<OptimizerState>,
    ) -> Result<(), Error> {
        self.flush()?;
        let mut restored = BTreeMap::new();
        for state in &mut states {
            for (slot, data) in &mut state.tensors {
                let (shape, layout) = self.state_place(&state.path, slot)?;
                let expected = self.divided(&shape, &layout).part_shape()?;
                let slots = self.scalars.slots(&state.path).iter();
                let mut dtype = slots
                    .filter(|other| *other.name == **slot)
                    .map(|slot| slot.dtype);
                let dtype = dtype.next_back().unwrap_or(data.dtype());
                if data.dtype() != dtype && is_exact_in(data, dtype) {
                    *data = data.clone().convert_dtype(dtype);
                }
                if data.shape().to_vec() != expected || data.dtype() != dtype {
                    let name = format!("{} {slot}", state.path);
                    let expected = (expected.as_slice(), dtype);
                    return Err(Error::mismatch("optimizer state", name, expected, data));
                }
            }
        }
        let host = states.iter().map(|state| {
            let names = state.tensors.iter().map(|(name, _)| name.as_str());
            (
                state.path.as_str(),
                state.counters.as_slice(),
                names.collect(),
            )
        });
        let host = self.scalars.restored(host)?;
        for state in states {
            for (slot, data) in state.tensors {
                let layout = self.state_place(&state.path, &slot)?.1;
                let key = (state.path.clone(), slot);
                restored.insert(key, Restored::of(data, &layout));
            }
        }
        self.scalars.set(host);
        self.restored = restored;
        self.done.steps = steps;
        Ok(())
    }

    /// Checks that [`set_shard`](Self::set_shard) would accept the data.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`]; [`Error::TensorMismatch`] if it has a different shape or type.
    pub fn check_shard(&self, path: &str, data: &TensorData) -> Result<(), Error> {
        let layout = self.layout(path)?;
        let spec = self.spec(path)?;
        let shape = self.divided(&spec.shape, &layout).part_shape()?;
        if data.shape().to_vec() == shape && data.dtype() == spec.dtype {
            return Ok(());
        }
        let expected = (shape.as_slice(), spec.dtype);
        Err(Error::mismatch("shard", path.to_owned(), expected, data))
    }
}

/// Returns true if the values of a float tensor are the same in another float type.
fn is_exact_in(data: &TensorData, dtype: DType) -> bool {
    let are_floats = data.dtype().is_float() && dtype.is_float();
    are_floats
        && data
            .clone()
            .convert_dtype(dtype)
            .convert_dtype(data.dtype())
            == *data
}
