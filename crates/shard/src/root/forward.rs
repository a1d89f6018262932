//! Forward: one gather a use, one node a parameter.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Pass, Phase, Progress, Root, Use};
use crate::error::Error;
use crate::generation::{Generation, State};
use crate::op::{self, Access, Milestone};
use crate::schedule::Operation;

impl Use {
    /// Drops the full parameters: from here on they live as long as the operations using them.
    pub(super) fn close(self) {
        if !self.generation.unit.keeps() {
            self.generation.reshard_after_forward();
        }
    }
}

impl Root {
    /// The full parameter that `slot` of `generation` stands for. Called by the model's own code,
    /// through `Param::val`.
    pub(crate) fn access<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<Tensor<D>, Error> {
        if !generation.value(slot).is_autodiff() {
            return self.read(generation, slot);
        }
        self.step(|progress| {
            if progress.phase == Phase::Backward {
                // That backward never came to its end: an unwinding that was not ours.
                self.clear(progress);
            }
            progress.phase = Phase::Forward;
            progress.open_use(self, generation, slot)?;
            progress.node(self, slot)
        })
    }

    /// A full parameter without autodiff: gather, run, free.
    fn read<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<Tensor<D>, Error> {
        let unit = &generation.unit;
        let full = self.step(|progress| {
            let last = progress.reading.upgrade();
            if let Some(last) = last
                && !Arc::ptr_eq(&last, generation)
                && !last.unit.keeps()
            {
                *last.state.lock() = State::Sharded;
            }
            progress.reading = Arc::downgrade(generation);
            if unit.slots[slot].is_gathered() {
                if generation.is_sharded() {
                    let operation = Operation::UnshardForward(unit.position());
                    self.start_gather(generation, operation)?;
                }
                self.finish_gather(generation)?;
            }
            self.full(generation, slot)
        })?;
        Ok(full.reshape::<D, _>(unit.slots[slot].dims::<D>()))
    }
}

impl Progress {
    /// Makes the unit of `generation` the one in use.
    fn open_use(
        &mut self,
        root: &Arc<Root>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        let place = (unit.position(), slot);
        let again = self
            .pass
            .as_ref()
            .is_some_and(|pass| pass.left_first && pass.first == place);
        if again {
            self.leave_pass();
        }
        if self.pass.is_none() {
            self.epoch = generation.epoch();
            self.schedules.select(root.choice());
            self.watch.begin();
            self.pass = Some(Pass::begin(root, generation, place));
        }
        let pass = self.pass.as_mut().expect("a pass has begun");
        let is_current = |used: &Use| Arc::ptr_eq(&used.generation, generation);
        if pass.current.as_ref().is_some_and(is_current) {
            return Ok(());
        }
        pass.left_first |= place.0 != pass.first.0;
        if let Some(last) = pass.current.take() {
            if last.generation.unit.keeps() {
                pass.kept.push(last);
            } else {
                last.close();
            }
        }
        if let Some(index) = pass.kept.iter().position(is_current) {
            pass.current = Some(pass.kept.swap_remove(index));
            return Ok(());
        }
        self.begin_use(root, generation, slot)
    }

    fn begin_use(
        &mut self,
        root: &Arc<Root>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        if !generation.is_unsharded() {
            let operation = Operation::UnshardForward(unit.position());
            self.unshard(root, operation, generation)?;
        }
        let id = self.num_uses;
        self.num_uses += 1;
        let end = Milestone::UnitEnd(Access {
            root: root.clone(),
            generation: generation.clone(),
            slot,
            use_id: id,
        });
        let pass = self.pass.as_mut().expect("a pass has begun");
        pass.token = op::chain(pass.token.clone(), unit.chain(), end);
        pass.current = Some(Use {
            id,
            generation: generation.clone(),
            token: pass.token.clone(),
            nodes: unit.places(),
        });
        Ok(())
    }

    /// The autodiff node of a parameter in the current use, made at the first access.
    fn node<const D: usize>(&mut self, root: &Arc<Root>, slot: usize) -> Result<Tensor<D>, Error> {
        let pass = self.pass.as_mut().expect("a pass has begun");
        let current = pass.current.as_mut().expect("a use has begun");
        if let Some(node) = &current.nodes[slot] {
            let node = node.downcast_ref::<Tensor<D>>();
            return Ok(node.expect("a slot keeps its rank").clone());
        }
        let full = root.full(&current.generation, slot)?;
        let access = Access {
            root: root.clone(),
            generation: current.generation.clone(),
            slot,
            use_id: current.id,
        };
        let value = current.generation.value(slot);
        let node: Tensor<D> = op::unshard(full, value, &current.token, access);
        current.nodes[slot] = Some(Box::new(node.clone()));
        Ok(node)
    }

    /// Lets go of a pass whose forward is over: its graph keeps what its backward needs.
    fn leave_pass(&mut self) {
        if let Some(pass) = self.pass.take()
            && let Some(last) = pass.current
        {
            last.close();
        }
    }
}

impl Pass {
    fn begin(root: &Arc<Root>, generation: &Generation, first: (usize, usize)) -> Self {
        let value = generation.value(first.1);
        // On the value's own device, so that both carry the same checkpointing strategy.
        let token = Tensor::<1>::zeros([1], &value.device()).require_grad();
        Self {
            first,
            left_first: false,
            token: op::chain(token, 1, Milestone::Finish(root.clone())),
            current: None,
            kept: Vec::new(),
        }
    }
}
