//! Seals of the values that the executor holds between nodes and between runs. A seal shows whether its value has
//! changed since it was written.
//!
//! The executor seals a collective's result when it arrives, from the data that the ranks reported about it. It seals
//! the new value of a parameter, buffer or state when a node has written it, or at the end of the run. It checks a
//! value when a node consumes it, which is its last use, and when a collective sends it. Values that no node of a step
//! consumes are checked at the end of the step. Memory that several values share is not overwritten, and a node that
//! overwrites a consumed value does so after the check. Only host memory is sealed.

use burn::tensor::{Bytes, DType, TensorData};
use burn_flex::FlexTensor;
use burn_fsdp_collectives::{At, Fingerprint, Label, ProcessGroup, Seal};
use burn_fsdp_tensors::on_host;
use burn_ir::{BackendIr, TensorId, TensorIr, TensorStatus};

use super::executor::Executor;
use super::sealed::{CarriedSeal, check};
use crate::error::Error;
use crate::graph::{Collective, Graph, Node, Parameter, Role, Stage, Storage, storage_of};

impl<B: BackendIr> Executor<B> {
    /// Checks the values that a node consumes. Returns the seal of a value that the node consumes and returns as a
    /// view.
    pub(super) fn look_at_taken(
        &mut self,
        index: usize,
        node: &Node,
    ) -> Result<Option<CarriedSeal>, Error> {
        if !self.group.compares_bytes() {
            return Ok(None);
        }
        // A collective checks the values that it sends.
        let gives = node.collective.as_ref().map(|collective| collective.stage);
        let gives = gives.is_some_and(|stage| stage != Stage::Wait);
        let mut carried = None;
        let taken = node.operation.inputs();
        for input in taken.filter(|input| input.status == TensorStatus::ReadWrite) {
            let Some(sealed) = self.seals.get(input.id) else {
                continue;
            };
            if gives {
                continue;
            }
            self.seals.remove(input.id);
            let Some(tensor) = self.host(input) else {
                continue;
            };
            if storage_of(node) == Storage::View(input.id) {
                let memory = memory_of(&tensor);
                carried = Some(CarriedSeal { sealed, memory });
            } else {
                check(&sealed, &self.group, index, &tensor)?
            }
        }
        Ok(carried)
    }

    /// Keeps the seal of a value that a node has returned as a view, and forgets the seals of values that a collective
    /// has sent.
    pub(super) fn keep_seals(&mut self, node: &Node, carried: Option<CarriedSeal>) {
        if !self.group.compares_bytes() {
            return;
        }
        if node.collective.is_some() {
            let taken = node.operation.inputs();
            taken
                .filter(|input| input.status == TensorStatus::ReadWrite)
                .for_each(|input| self.seals.remove(input.id));
        }
        if let (Some(carried), Some(output)) = (carried, node.operation.outputs().next()) {
            let lies = self.host(output).map(|tensor| memory_of(&tensor));
            if lies == Some(carried.memory) {
                self.seals.set(output.id, Some(carried.sealed));
            }
        }
    }

    /// Keeps the seal of a collective's result for one of its parts. Flips a bit of the result if fault injection
    /// requests it.
    pub(super) fn seal_result(
        &mut self,
        id: TensorId,
        (collective, part): (&Collective, usize),
        (data, seal): (TensorData, Option<Seal>),
    ) -> TensorData {
        let (at, kind) = if collective.kind.contract().reduces {
            (At::Gradient, "the reduced")
        } else {
            (At::Weight, "the gathered")
        };
        if let Some(seal) = seal {
            let path = collective.parts.get(part).map(|part| part.path.as_ref());
            let what = format!("{kind} {} ({})", path.unwrap_or("part"), collective.label);
            let what = Label::from(what);
            self.seals.keep(id, seal, what);
        }
        flipped(&self.group, at, data)
    }

    /// Seals the values that were set since the last run and outlive this run. Flips a bit of present values if fault
    /// injection requests it.
    pub(super) fn seal_given(&mut self, graph: &Graph) -> Result<(), Error> {
        let at = |role: &Role| match role {
            Role::Parameter(_) => Some(At::Shard),
            Role::Buffer(_) | Role::PassState(_) => Some(At::Running),
            Role::State { .. } => Some(At::State),
            _ => None,
        };
        let given = graph.values().filter_map(|value| {
            let is_here = self.has(value.id) && !self.absent.contains(value.id);
            let at = at(&value.role).filter(|_| is_here)?;
            Some((value.id, at, value.role.clone()))
        });
        for (id, at, role) in given.collect::<Vec<_>>() {
            if self.group.awaits_flip(at) {
                let sealed = self.seals.get(id);
                let data = self.get(id)?;
                let data = flipped(&self.group, at, data);
                self.set(id, data);
                self.seals.set(id, sealed);
            }
            if self.group.compares_bytes() && self.seals.get(id).is_none() {
                self.seal(id, &role);
            }
        }
        Ok(())
    }

    /// Reads a given value back to the host, after a check against its seal.
    pub(crate) fn get_sealed(&mut self, id: TensorId) -> Result<TensorData, Error> {
        if let Some(sealed) = self.seals.get(id)
            && let Some((shape, dtype)) = self.present.get(&id).cloned()
            && let Some(tensor) = self.host(&ir(id, shape, dtype))
        {
            check(&sealed, &self.group, 0, &tensor)?;
        }
        self.get(id)
    }

    /// Replaces the elements of a given value, and seals it again if it was sealed.
    pub(crate) fn replace(&mut self, id: TensorId, data: TensorData) {
        let sealed = self.seals.get(id);
        let like = ir(id, data.shape().to_vec(), data.dtype());
        self.set(id, data);
        if let Some(sealed) = sealed
            && let Some(seal) = self.sealed(&like)
        {
            self.seals.keep(id, seal, sealed.what.clone());
        }
    }

    /// Records which values of this run must be sealed once a node has written them.
    pub(super) fn await_written(&mut self, graph: &Graph) {
        let updates = graph.updates().iter();
        let is_sealed = |from| self.group.compares_bytes() && !self.absent.contains(from);
        let fresh = updates.filter(|update| is_sealed(update.from));
        self.seals.fresh = fresh.map(|update| (update.from, None)).collect();
    }

    /// Seals the new value of a parameter, buffer or state right after a node has written it, while it is still in the
    /// cache.
    pub(super) fn seal_written(&mut self, node: &Node) {
        if self.seals.fresh.is_empty() {
            return;
        }
        for output in node.operation.outputs() {
            if self.seals.fresh.contains_key(&output.id) {
                let seal = self.sealed(output);
                self.seals.fresh.insert(output.id, seal);
            }
        }
    }

    /// Checks the values that a step has read or received and that no node has consumed, before the step replaces any
    /// of them. After an evaluation, the next step checks them.
    pub(super) fn look_at_left(&mut self, graph: &Graph) -> Result<(), Error> {
        if !self.group.compares_bytes() || graph.updates().is_empty() {
            return Ok(());
        }
        let last = graph.nodes().len().saturating_sub(1);
        for value in graph.values() {
            let Some(sealed) = self.seals.get(value.id) else {
                continue;
            };
            let tensor = self.host(&ir(value.id, value.shape.clone(), value.dtype));
            if let Some(tensor) = tensor {
                check(&sealed, &self.group, last, &tensor)?;
            }
        }
        Ok(())
    }

    /// Seals the values that a run has left, and reports the values that every rank holds whole to the other ranks.
    pub(super) fn seal_left(&mut self, graph: &Graph) {
        // Values that were consumed during the run are gone.
        let present = &self.present;
        self.seals.retain(|id| present.contains_key(&id));
        if !self.group.compares_bytes() || graph.updates().is_empty() {
            return;
        }
        let fresh = std::mem::take(&mut self.seals.fresh);
        for update in graph.updates() {
            let value = graph.value(update.into);
            let Some(value) = value.filter(|of| !self.absent.contains(of.id)) else {
                continue;
            };
            match fresh.get(&update.from).cloned().flatten() {
                Some(seal) => self.keep(update.into, &value.role, seal),
                None => self.seal(update.into, &value.role),
            }
        }
        self.seals.steps += 1;
        if self.group.size() > 1 {
            let whole = |parameter: &&Parameter| {
                parameter.gradient.is_some() && parameter.layout.is_whole()
            };
            for parameter in graph.parameters().iter().filter(whole) {
                self.tell_replica(parameter.value);
                parameter
                    .states
                    .iter()
                    .for_each(|id| self.tell_replica(*id));
            }
        }
    }

    fn tell_replica(&self, id: TensorId) {
        if let Some(sealed) = self.seals.get(id) {
            let number = Fingerprint::of(&(sealed.what.as_str(), self.seals.steps));
            let what = || sealed.what.clone();
            self.group.tell_replica(number, &sealed.seal, what);
        }
    }

    fn seal(&mut self, id: TensorId, role: &Role) {
        let Some((shape, dtype)) = self.present.get(&id).cloned() else {
            return;
        };
        if let Some(seal) = self.sealed(&ir(id, shape, dtype)) {
            self.keep(id, role, seal);
        }
    }

    /// Returns the current seal of a value, if the value is in host memory.
    fn sealed(&mut self, tensor: &TensorIr) -> Option<Seal> {
        let tensor = self.host(tensor)?;
        self.group.seal(tensor.bytes())
    }

    fn keep(&mut self, id: TensorId, role: &Role, seal: Seal) {
        self.seals.keep(id, seal, Label::from(role.to_string()));
    }

    /// Returns a value, if it is in host memory.
    fn host(&mut self, tensor: &TensorIr) -> Option<FlexTensor> {
        let tensor = TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        };
        on_host(&self.interpreter.get_tensor(&tensor)).cloned()
    }
}

fn ir(id: TensorId, shape: Vec<usize>, dtype: DType) -> TensorIr {
    TensorIr {
        id,
        shape: shape.into(),
        status: TensorStatus::ReadOnly,
        dtype,
    }
}

/// Returns the address of a tensor's memory, and its length in bytes.
fn memory_of(tensor: &FlexTensor) -> (usize, usize) {
    (tensor.bytes().as_ptr() as usize, tensor.bytes().len())
}

/// Returns the data, with one bit flipped if fault injection requests it.
fn flipped(group: &ProcessGroup, at: At, data: TensorData) -> TensorData {
    let Some(bit) = group.flips(at, data.as_bytes().len()) else {
        return data;
    };
    let (shape, dtype): (_, DType) = (data.shape().clone(), data.dtype());
    let mut bytes = data.as_bytes().to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, dtype)
}
