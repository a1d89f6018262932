//! Forward: one gather per use, one node per parameter.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_tensors::Staging;

use super::access::{Access, Finish, UnitEnd};
use super::pass::{Pass, Place, Recomputation, Use};
use super::state::{Phase, Progress, Root};
use crate::ambient;
use crate::copies::{Copied, Generation};
use crate::device;
use crate::error::Error;
use crate::op::{self, Announce};
use crate::read;
use crate::region::{self, Recomputed, RegionState, SharedUse};
use crate::schedule::Operation;

impl Use {
    /// Returns the autodiff node of a parameter, as a function of `value`. The node is created at the first access.
    fn node_of<const D: usize>(
        &mut self,
        root: &Arc<Root>,
        slot: usize,
        value: Tensor<1>,
        stays: bool,
    ) -> Result<Tensor<D>, Error> {
        if let Some(node) = &self.nodes[slot] {
            let node = node.downcast_ref::<Tensor<D>>();
            return Ok(node.expect("a slot keeps its rank").clone());
        }
        let full = root.weight(&self.generation, slot)?;
        // An adapted weight is not kept: it is recomputed from the kept weights.
        let (value, stays) = match self.generation.adapted_leaf(slot) {
            Some(leaf) => (leaf, false),
            None => (value, stays),
        };
        let access = Access {
            root: root.clone(),
            generation: self.generation.clone(),
            slot,
            use_id: self.shared.id,
            stays,
        };
        let node: Tensor<D> = op::unshard(full, value, &self.token, Arc::new(access));
        self.nodes[slot] = Some(Box::new(node.clone()));
        Ok(node)
    }
}

impl Root {
    /// Returns the full parameter at `place` in `generation` for copy `copy` of the module, with `value` as this rank's
    /// part. Called from the model's code, through `Param::val`.
    pub(crate) fn access<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        place: Place,
        copy: Copied,
        value: Tensor<1>,
    ) -> Result<Tensor<D>, Error> {
        let slot = place.slot;
        read::note(&generation.unit, slot);
        let of = &generation.unit.slots[slot];
        if let Some(layer) = &of.unfit {
            return Err(layer.refuses(&of.path, of.elements.compute.dtype));
        }
        if !value.is_autodiff() {
            return self.read(generation, slot);
        }
        if region::state() == RegionState::Again {
            return self.access_again(generation, slot);
        }
        self.step(|progress| {
            progress.expect_no_evaluation(generation)?;
            if progress.phase == Phase::Backward {
                // The previous backward never ended, because of a panic outside the engine.
                self.clear(progress);
            }
            progress.phase = Phase::Forward;
            progress.begin_pass(self, generation, copy, place)?;
            progress.open_use(self, generation)?;
            match region::state() {
                RegionState::Plain => progress.plain(self, slot),
                _ => progress.node(self, slot, value),
            }
        })
    }

    /// Returns a full parameter for the second forward of a recomputed region. It is kept until the region's backward,
    /// which follows immediately.
    fn access_again<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<Tensor<D>, Error> {
        self.step(|progress| {
            progress.enter_backward(self)?;
            let index = progress.open_again(self, generation, slot)?;
            let again = progress
                .uses
                .again
                .as_mut()
                .expect("a recomputation has begun");
            let current = &mut again.uses[index];
            region::touch(self, &again.token, &current.shared);
            // A separate leaf: the parameter's own may be in the graph around the region.
            current.node_of(self, slot, generation.own_leaf(slot), true)
        })
    }

    /// Adds a link to `token`, one level deeper than `depth`, and returns it.
    fn link(&self, token: &Tensor<1>, depth: usize, milestone: Arc<dyn Announce>) -> Tensor<1> {
        let ruler = self.rulers.lock().of_depth(depth, &token.device());
        op::link(token.clone(), ruler, milestone)
    }

    /// Returns a full parameter without autodiff, and frees the parameters of the unit that was read before.
    fn read<const D: usize>(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<Tensor<D>, Error> {
        let unit = &generation.unit;
        let full = self.step(|progress| {
            let last = progress.reading.last.upgrade();
            if let Some(last) = last
                && !Arc::ptr_eq(&last, generation)
                && !last.unit.keeps()
            {
                last.let_go()?;
            }
            progress.reading.last = Arc::downgrade(generation);
            if unit.is_gathered_for(slot) {
                let is_gathered = !generation.life.is_unsharded();
                if generation.life.is_sharded() {
                    progress.meet_others(generation)?;
                    let operation = Operation::UnshardForward(unit.position());
                    self.start_gather(generation, operation)?;
                }
                // Reads by the engine, for example to save a module, belong to no forward.
                let is_forward = progress.routes.is_none() && !ambient::is_engine();
                if is_forward && (progress.reading.enter(generation) || is_gathered) {
                    progress.read_ahead(self, generation, is_gathered)?;
                }
                self.finish_gather(generation)?;
            }
            self.weight(generation, slot)
        })?;
        Ok(full.reshape::<D, _>(unit.slots[slot].dims::<D>()))
    }
}

impl Recomputed for Root {
    fn end_recomputation(&self) {
        self.progress().uses.again = None;
    }

    fn staging(&self) -> Arc<Staging> {
        let unit = self.units().into_iter().next();
        unit.map(|unit| unit.staging.clone()).unwrap_or_default()
    }
}

impl Progress {
    /// Starts the gathers that follow a read of `generation`: those of the units that the program listed for its unit,
    /// if the unit is gathered for this read, or else the next ones of the last forward, up to the prefetch limit.
    fn read_ahead(
        &mut self,
        root: &Root,
        generation: &Arc<Generation>,
        is_gathered: bool,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        let next = match unit.listed_after(Operation::UnshardForward(unit.position())) {
            Some(listed) if is_gathered => {
                let listed: Vec<_> = listed.into_iter().filter_map(Operation::unit).collect();
                self.reading.listed(generation, &listed)
            }
            Some(_) => Vec::new(),
            None => self.reading.expected(root.prefetch()),
        };
        for next in next.into_iter().filter(|next| next.life.is_sharded()) {
            root.start_gather(&next, Operation::UnshardForward(next.unit.position()))?;
            self.reading.ahead.push(Arc::downgrade(&next));
        }
        Ok(())
    }

    /// In an evaluation in which ranks take different routes, waits until the unit of `generation` is the next one that
    /// all ranks gather.
    pub(super) fn meet_others(&self, generation: &Arc<Generation>) -> Result<(), Error> {
        let routes = self.routes.clone();
        routes.map_or(Ok(()), |routes| routes.meet(generation))
    }

    /// Rejects training during an evaluation with different routes, because the evaluation's gathers have no recorded
    /// order.
    fn expect_no_evaluation(&self, generation: &Generation) -> Result<(), Error> {
        match &self.routes {
            None => Ok(()),
            Some(_) => Err(Error::State {
                unit: generation.unit.label(),
                expected: "part of the module that `evaluate` passes to the closure".to_owned(),
                got: "part of the module being trained".to_owned(),
                advice: "run the module that the closure receives",
            }),
        }
    }

    /// Begins a pass, unless this access continues the current one.
    fn begin_pass(
        &mut self,
        root: &Arc<Root>,
        generation: &Arc<Generation>,
        copy: Copied,
        place: Place,
    ) -> Result<(), Error> {
        let place = (generation.unit.position(), place);
        let again = self
            .uses
            .pass
            .as_ref()
            .is_some_and(|pass| pass.left_first && pass.first == place);
        if again {
            self.leave_pass()?;
        }
        if self.uses.pass.is_none() {
            self.order.copy = copy;
            self.order.used.clear();
            self.begin_order(root);
            self.watch.begin();
            self.counts.passes += 1;
            let mut pass = Pass::begin(root, generation, place);
            pass.number = self.counts.passes;
            pass.copy = copy.number;
            self.uses.pass = Some(pass);
        }
        Ok(())
    }

    /// Makes a use of the unit of `generation` the current use, and ends the previous one.
    fn open_use(&mut self, root: &Arc<Root>, generation: &Arc<Generation>) -> Result<(), Error> {
        let position = generation.unit.position();
        let pass = self.uses.pass.as_mut().expect("a pass has begun");
        let is_current = |used: &Use| Arc::ptr_eq(&used.generation, generation);
        if pass.current.as_ref().is_some_and(is_current) {
            return Ok(());
        }
        pass.left_first |= position != pass.first.0;
        if let Some(last) = pass.current.take() {
            if last.generation.unit.keeps() {
                pass.kept.push(last.set_aside());
            } else {
                last.close()?;
            }
        }
        if let Some(index) = pass.kept.iter().position(is_current) {
            pass.current = Some(pass.kept.swap_remove(index));
            return Ok(());
        }
        self.begin_use(root, generation)
    }

    fn begin_use(&mut self, root: &Arc<Root>, generation: &Arc<Generation>) -> Result<(), Error> {
        let unit = &generation.unit;
        let id = self.next_use();
        self.order
            .used
            .insert(unit.position(), Arc::downgrade(generation));
        if !generation.life.is_unsharded() {
            let operation = Operation::UnshardForward(unit.position());
            self.unshard(root, operation, generation)?;
            self.order.current().begin_use(id);
        }
        let pass = self.uses.pass.as_mut().expect("a pass has begun");
        let shared = SharedUse::new(id, generation);
        let end = UnitEnd::new(root, generation, &shared);
        // The link is deeper than the previous unit's operations, so backward ends this use before it reaches them.
        pass.depth += unit.stride();
        pass.token = root.link(&pass.token, pass.depth, end);
        let of_pass = (pass.number, Arc::downgrade(unit));
        self.uses.open.insert(id, of_pass);
        pass.current = Some(Use::new(shared, generation, &pass.token));
        Ok(())
    }

    fn next_use(&mut self) -> u64 {
        let id = self.counts.uses;
        self.counts.uses += 1;
        id
    }

    /// Returns the index of the use of `generation`'s unit in the current recomputation, and begins the recomputation
    /// if necessary.
    fn open_again(
        &mut self,
        root: &Arc<Root>,
        generation: &Arc<Generation>,
        slot: usize,
    ) -> Result<usize, Error> {
        let again = self.uses.again.get_or_insert_with(|| Recomputation {
            token: leaf_token(generation, slot),
            depth: 0,
            uses: Vec::new(),
        });
        let is_known = |used: &Use| Arc::ptr_eq(&used.generation, generation);
        if let Some(index) = again.uses.iter().position(is_known) {
            return Ok(index);
        }
        let unit = &generation.unit;
        if !generation.life.is_unsharded() {
            let operation = Operation::UnshardBackward(unit.position());
            self.unshard(root, operation, generation)?;
        }
        let shared = self.use_of_region(generation);
        let again = self.uses.again.as_mut().expect("a recomputation has begun");
        if !shared.is_shared() {
            let end = UnitEnd::new(root, generation, &shared);
            again.depth += unit.stride();
            again.token = root.link(&again.token, again.depth, end);
        }
        again.uses.push(Use::new(shared, generation, &again.token));
        Ok(again.uses.len() - 1)
    }

    /// Returns the use of `generation`'s unit that gets the gradients of the current recomputation: the last one in
    /// which its region ran, because backward ends it first. Ends the others that have no other part.
    fn use_of_region(&mut self, generation: &Arc<Generation>) -> Arc<SharedUse> {
        let mut uses = region::uses_of(generation);
        // Only a region that differs from its first run uses other units.
        let last = uses.pop();
        for shared in uses {
            if !shared.is_shared() && shared.end() {
                self.close_use(&shared);
            }
        }
        last.unwrap_or_else(|| SharedUse::new(self.next_use(), generation))
    }

    /// Returns a full parameter for the first forward of a region, without a node.
    fn plain<const D: usize>(&mut self, root: &Arc<Root>, slot: usize) -> Result<Tensor<D>, Error> {
        let pass = self.uses.pass.as_ref().expect("a pass has begun");
        let current = pass.current.as_ref().expect("a use has begun");
        region::touch(root, &pass.token, &current.shared);
        let generation = &current.generation;
        let full = root.weight(generation, slot)?;
        let full = full.reshape::<D, _>(generation.unit.slots[slot].dims::<D>());
        Ok(device::tracked(full, &generation.device(slot)))
    }

    /// Returns the autodiff node of a parameter in the current use.
    fn node<const D: usize>(
        &mut self,
        root: &Arc<Root>,
        slot: usize,
        value: Tensor<1>,
    ) -> Result<Tensor<D>, Error> {
        let pass = self.uses.pass.as_mut().expect("a pass has begun");
        let current = pass.current.as_mut().expect("a use has begun");
        // Burn keeps a graph's leaves until backward ends. A stand-in lets a shard that is stepped before be freed.
        let value = if self.early.is_likely {
            current.generation.own_leaf(slot)
        } else {
            current.generation.leaf(slot, value)
        };
        current.shared.add_nodes();
        let stays = current.generation.unit.keeps();
        current.node_of(root, slot, value, stays)
    }

    /// Ends the forward of the current pass. Its graph keeps the values that backward needs.
    fn leave_pass(&mut self) -> Result<(), Error> {
        let pass = self.uses.pass.take();
        let last = pass.and_then(|pass| pass.current);
        last.map_or(Ok(()), Use::close)
    }
}

impl Pass {
    fn begin(root: &Arc<Root>, generation: &Generation, first: (usize, Place)) -> Self {
        let token = leaf_token(generation, first.1.slot);
        Self {
            number: 0,
            copy: 0,
            first,
            left_first: false,
            token: root.link(&token, 0, Arc::new(Finish(root.clone()))),
            depth: 0,
            current: None,
            kept: Vec::new(),
        }
    }
}

/// Returns a new token on the device of a unit's values, so both use the same checkpointing strategy.
fn leaf_token(generation: &Generation, slot: usize) -> Tensor<1> {
    Tensor::<1>::zeros([1], &generation.device(slot)).require_grad()
}
