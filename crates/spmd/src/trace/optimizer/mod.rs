//! A Burn optimizer's steps as operations, and the host values in them.
//!
//! On the host, an optimizer may do anything: count steps, follow a schedule, inspect shapes and types, or branch. So
//! it also runs at every step, on tensors that are recorded but not computed. It runs once for all parameters of one
//! shape, type and history. Its operations are compared with the graph's. If they are equal, the graph runs with the
//! scalars of this step; otherwise another graph is created for them. An optimizer that cannot be traced is rejected
//! with the reason. Each group of parameters has its own optimizer and rate.

mod form;
mod groups;
mod structure;
mod twin;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::DType;
use burn_fsdp_collectives::Fingerprint;
use burn_fsdp_tensors::StateFormat;
use burn_ir::{OperationIr, ScalarIr};
use burn_pack::Scalar;

pub use groups::OptimizerGroups;
pub(crate) use groups::base_rate;
pub(crate) use structure::{Slot, gradient_id, parameter_id, state_id};
use structure::{Structure, with_scalars};
use twin::{Twin, TwinState, TwinStep};

use crate::error::Error;

/// Maximum number of operation sequences that an optimizer may have for parameters of one shape and type. A graph is
/// created for each.
const MAX_STRUCTURES: usize = 16;

/// The optimizer step to trace. The first step has no state yet, so its operations differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OptimizerStep {
    /// The first step, without a state.
    First,
    /// The third step, with the state after the first two.
    Next,
}

/// The host side of the optimizers: their states for every trained parameter, without tensor elements.
pub(crate) struct HostScalars {
    optimizers: OptimizerGroups,
    kinds: Vec<Kind>,
    parameters: BTreeMap<Arc<str>, Held>,
}

/// A trained parameter.
pub(crate) struct Trained {
    pub(crate) id: ParamId,
    pub(crate) path: Arc<str>,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

/// The parameters of one group, shape and type.
struct Kind {
    /// Index of their optimizer.
    group: usize,
    shape: Vec<usize>,
    dtype: DType,
    /// Path of one of the parameters, for messages.
    path: Arc<str>,
    twin: Box<dyn Twin>,
    /// The operation sequences seen so far.
    structures: Vec<Arc<Structure>>,
}

struct Held {
    id: ParamId,
    kind: usize,
    /// The state, `None` before the parameter's first step. Parameters with the same history share it.
    state: Option<Arc<TwinState>>,
}

/// The operations and scalars of one step of the optimizer, for every trained parameter.
#[derive(Debug, Clone, Default)]
pub struct StepScalars {
    parameters: BTreeMap<Arc<str>, Arc<ParameterStep>>,
}

/// The operations and scalars of one step of the optimizer, for the parameters of one kind, rate and history.
#[derive(Debug)]
pub(crate) struct ParameterStep {
    rate: f64,
    structure: Arc<Structure>,
    /// Index of the kind, and index of the structure in the kind.
    number: (usize, usize),
    pub(crate) slots: Arc<Vec<Slot>>,
    scalars: Vec<Vec<ScalarIr>>,
    next: Option<Arc<TwinState>>,
}

impl ParameterStep {
    /// Returns the operations, with the scalars of this step.
    pub(crate) fn operations(&self) -> impl Iterator<Item = OperationIr> {
        let operations = self.structure.operations.iter().zip(&self.scalars);
        operations.map(|(operation, scalars)| with_scalars(operation, scalars))
    }

    pub(crate) fn structure(&self) -> &Structure {
        &self.structure
    }
}

impl StepScalars {
    /// Returns the scalars of the operation at `position` in this parameter's step, if there is one.
    pub fn get(&self, path: &str, position: usize) -> Option<&[ScalarIr]> {
        let scalars = self.parameters.get(path)?.scalars.get(position)?;
        Some(scalars)
    }

    /// Returns a fingerprint of the rates and scalars, which is equal on all ranks if they are.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = Fingerprint::new();
        for (path, step) in &self.parameters {
            (path, step.rate.to_bits(), &step.scalars).hash(&mut hasher);
        }
        hasher.finish()
    }

    pub(crate) fn of(&self, path: &str) -> Option<&Arc<ParameterStep>> {
        self.parameters.get(path)
    }

    /// Returns an identifier of each parameter's operation sequence, in the order of the paths. An optimizer may branch
    /// on its step number, or omit operations when a scalar is zero, and the step then needs another graph. The
    /// identifiers are valid only within one compiled step.
    pub fn structure(&self) -> Vec<(usize, usize)> {
        self.parameters.values().map(|step| step.number).collect()
    }
}

impl HostScalars {
    /// Creates the host side for trained parameters, before the first step. Records steps at `learning_rate` to find
    /// the state tensors.
    ///
    /// # Errors
    ///
    /// [`Error::UntraceableOptimizer`] if an optimizer reads tensors, or rejects a parameter.
    pub(crate) fn new(
        optimizers: OptimizerGroups,
        learning_rate: f64,
        parameters: impl IntoIterator<Item = Trained>,
    ) -> Result<Self, Error> {
        let mut new = Self {
            optimizers,
            kinds: Vec::new(),
            parameters: BTreeMap::new(),
        };
        for parameter in parameters {
            let Trained {
                id,
                path,
                shape,
                dtype,
            } = parameter;
            let group = new.optimizers.of(id, &path);
            let mut kinds = new.kinds.iter();
            let known = kinds
                .position(|kind| (kind.group, &kind.shape, kind.dtype) == (group, &shape, dtype));
            let kind = match known {
                Some(kind) => kind,
                None => {
                    let twin = new.optimizers.twin(group, learning_rate, (&shape, dtype));
                    let optimizer = new.optimizers.name(group);
                    let twin = twin.map_err(|reason| untraceable(optimizer, &path, reason))?;
                    new.kinds.push(Kind {
                        group,
                        shape,
                        dtype,
                        path: path.clone(),
                        twin,
                        structures: Vec::new(),
                    });
                    new.kinds.len() - 1
                }
            };
            let state = None;
            new.parameters.insert(path, Held { id, kind, state });
        }
        Ok(new)
    }

    /// Returns an error that names the optimizer of a parameter.
    pub(crate) fn untraceable(&self, path: &str, reason: String) -> Error {
        let held = self.parameters.get(path);
        let group = held.map_or(0, |held| self.kinds[held.kind].group);
        untraceable(self.optimizers.name(group), path, reason)
    }

    /// Returns the operations and scalars of the next step at these learning rates.
    ///
    /// # Errors
    ///
    /// [`Error::UntraceableOptimizer`] if an optimizer cannot be traced; [`Error::Missing`] without a rate.
    pub(crate) fn peek(&mut self, rates: &ModuleLearningRate) -> Result<StepScalars, Error> {
        type Past = (usize, u64, Option<*const TwinState>);
        if base_rate(rates).is_none() {
            let what = "the learning rate".to_owned();
            return Err(Error::Missing { what });
        }
        let mut done: BTreeMap<Past, Arc<ParameterStep>> = BTreeMap::new();
        let mut step = StepScalars::default();
        for (path, held) in &self.parameters {
            let rate = rates.lr_from_param(held.id, Some(path));
            let state = held.state.as_ref().map(Arc::as_ptr);
            let past = (held.kind, rate.to_bits(), state);
            let of_past = match done.get(&past) {
                Some(known) => known.clone(),
                None => {
                    let kind = &mut self.kinds[held.kind];
                    let made = kind.step(held.kind, rate, held.state.as_deref());
                    let optimizer = self.optimizers.name(kind.group);
                    let made = made.map_err(|reason| untraceable(optimizer, path, reason))?;
                    done.entry(past).or_insert(Arc::new(made)).clone()
                }
            };
            step.parameters.insert(path.clone(), of_past);
        }
        Ok(step)
    }

    /// Advances the host state of the parameters for which `is_trained` is true.
    pub(crate) fn advance(&mut self, step: &StepScalars, is_trained: impl Fn(&str) -> bool) {
        for (path, held) in &mut self.parameters {
            if let Some(step) = step.parameters.get(path).filter(|_| is_trained(path)) {
                held.state = step.next.clone();
            }
        }
    }

    /// Returns the named numbers in a parameter's optimizer state, such as its step counter; `None` before its first
    /// step.
    pub(crate) fn counters(&self, path: &str) -> Option<&[(String, Scalar)]> {
        Some(&self.parameters.get(path)?.state.as_ref()?.scalars)
    }

    /// Returns true if a parameter's optimizer state currently has this tensor.
    pub(crate) fn has_tensor(&self, path: &str, slot: &str) -> bool {
        let Some(held) = self.parameters.get(path) else {
            return false;
        };
        let slots = self.kinds[held.kind].twin.slots();
        let state = held.state.as_ref();
        state.is_some_and(|state| {
            state
                .tensors
                .iter()
                .any(|index| *slots[*index].name == *slot)
        })
    }

    /// Returns all tensors that a parameter's optimizer state can have.
    pub(crate) fn slots(&self, path: &str) -> &[Slot] {
        match self.parameters.get(path) {
            Some(held) => self.kinds[held.kind].twin.slots().as_slice(),
            None => &[],
        }
    }

    /// Returns the format in which a parameter's states are kept between steps, if they are rounded.
    pub(crate) fn format(&self, path: &str) -> Option<StateFormat> {
        self.slots(path).first()?.format
    }

    /// Creates optimizer states for these parameters from their numbers and tensor names. [`set`](Self::set) applies
    /// them, and leaves all other parameters without a state.
    pub(crate) fn restored<'a>(
        &self,
        states: impl IntoIterator<Item = (&'a str, &'a [(String, Scalar)], Vec<&'a str>)>,
    ) -> Result<RestoredStates, Error> {
        let mut restored = RestoredStates(BTreeMap::new());
        type Made<'a> = (usize, Vec<usize>, &'a [(String, Scalar)], Arc<TwinState>);
        let mut made: Vec<Made<'_>> = Vec::new();
        for (path, scalars, names) in states {
            let Some((path, held)) = self.parameters.get_key_value(path) else {
                return Err(self.untraceable(path, "it is not trained".to_owned()));
            };
            let twin = &self.kinds[held.kind].twin;
            let mut tensors = Vec::new();
            for name in names {
                let found = twin.slots().iter().position(|slot| *slot.name == *name);
                let known = twin.slots().iter().map(|slot| slot.name.as_ref());
                tensors.push(found.ok_or_else(|| Error::UnknownName {
                    what: "optimizer state",
                    name: format!("{path} {name}"),
                    known: known.collect::<Vec<_>>().join(", "),
                })?);
            }
            tensors.sort_unstable();
            let alike = made.iter().find(|(kind, of, numbers, _)| {
                *kind == held.kind && *of == tensors && *numbers == scalars
            });
            let state = match alike {
                Some((.., state)) => state.clone(),
                None => {
                    let state = twin.state(scalars, &tensors);
                    let state = state.map_err(|reason| self.untraceable(path, reason))?;
                    let state = Arc::new(state);
                    made.push((held.kind, tensors, scalars, state.clone()));
                    state
                }
            };
            restored.0.insert(path.clone(), state);
        }
        Ok(restored)
    }

    /// Replaces all states with the restored ones.
    pub(crate) fn set(&mut self, mut restored: RestoredStates) {
        for (path, held) in &mut self.parameters {
            held.state = restored.0.remove(path);
        }
    }
}

/// The states that [`HostScalars::restored`] created.
#[derive(Debug)]
pub(crate) struct RestoredStates(BTreeMap<Arc<str>, Arc<TwinState>>);

impl Kind {
    fn step(
        &mut self,
        own: usize,
        learning_rate: f64,
        state: Option<&TwinState>,
    ) -> Result<ParameterStep, String> {
        let TwinStep {
            structure,
            scalars,
            next,
        } = self.twin.step(learning_rate, state)?;
        let known = self
            .structures
            .iter()
            .position(|other| **other == structure);
        let number = match known {
            Some(number) => number,
            None if self.structures.len() >= MAX_STRUCTURES => {
                let last = &self.structures[MAX_STRUCTURES - 1];
                return Err(format!(
                    "its operations keep changing: after {MAX_STRUCTURES} different steps for {:?} tensors \
                     such as \"{}\", {}",
                    self.shape,
                    self.path,
                    structure.difference(last)
                ));
            }
            None => {
                self.structures.push(Arc::new(structure));
                self.structures.len() - 1
            }
        };
        Ok(ParameterStep {
            rate: learning_rate,
            structure: self.structures[number].clone(),
            number: (own, number),
            slots: self.twin.slots().clone(),
            scalars,
            next,
        })
    }
}

fn untraceable(optimizer: &'static str, path: &str, reason: String) -> Error {
    Error::UntraceableOptimizer {
        optimizer,
        path: path.to_owned(),
        reason,
    }
}

impl fmt::Debug for HostScalars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostScalars")
            .field("optimizers", &self.optimizers)
            .field("parameters", &self.parameters.keys())
            .finish_non_exhaustive()
    }
}
