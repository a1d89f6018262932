//! Gradients held on this rank until other gradients of the same use arrive, a reduction starts, or backward ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_fsdp_collectives::{Account, BufferPool, Label, RestKind};

use super::audited::{Audited, Station};
use crate::convert::cast;
use crate::copies::Generation;
use crate::error::Error;
use crate::seal;
use crate::slot::Slots;
use crate::unit::Unit;

/// The description of a held-back gradient in messages.
const HELD: &str = "the gradient held back";

/// A full gradient, counted as unsharded memory while it exists.
pub(super) struct Gradient {
    pub(super) tensor: Tensor<1>,
    pub(super) account: Account,
}

/// A unit whose part of backward has ended, with the gradients that wait for the end of backward.
pub(super) struct Ended {
    pub(super) generation: Arc<Generation>,
    /// Gradients of parameters kept whole, by slot. Their memory is not counted.
    pub(super) whole: Slots<Tensor<1>>,
}

/// The gradients held on this rank, by the event that they wait for.
#[derive(Default)]
pub(super) struct Accumulation {
    /// Full gradients by use, until the unit's gradients are complete.
    pub(super) of_uses: BTreeMap<u64, Slots<Gradient>>,
    /// Units whose gradients are complete in this backward, with the gradients that wait for its end.
    pub(super) ended: Vec<Ended>,
    /// Gradients of steps without reduction, by unit, until the unit's next reduction.
    pub(super) held: BTreeMap<usize, Slots<Gradient>>,
    /// Shards' gradients that wait for the all-reduce across replicas or the last backward, by unit.
    pub(super) partial: BTreeMap<usize, Slots<Tensor<1>>>,
    /// Reduced gradients of parameters kept whole that wait for the last backward, by unit.
    pub(super) whole: BTreeMap<usize, Slots<Tensor<1>>>,
}

impl Accumulation {
    /// Holds back the gradients of one use of a unit on this rank, in the type in which they will be reduced.
    pub(super) fn hold(
        &mut self,
        audited: &mut Audited,
        pool: &BufferPool,
        (generation, use_id): (&Arc<Generation>, u64),
        gradients: Slots<Gradient>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        let held = self
            .held
            .entry(unit.position())
            .or_insert_with(|| unit.empty_slots());
        let places = held.iter_mut().zip(gradients).zip(&unit.slots);
        for (index, ((place, gradient), slot)) in places.enumerate() {
            let Some(gradient) = gradient else { continue };
            let at = seal::place(index, RestKind::HeldBack);
            if let Some(earlier) = place {
                seal::check(&unit.seals, at, &earlier.tensor)?;
            }
            let gradient = if gradient.tensor.dtype() == slot.elements.reduce.dtype {
                gradient
            } else {
                Gradient {
                    tensor: cast(gradient.tensor, slot.elements.reduce.dtype),
                    account: pool
                        .account(slot.partition.num_elements() * slot.elements.reduce.size()),
                }
            };
            gradient.add_to(place);
            audited.added(unit, index, Station::Use(use_id), Station::HeldBack);
            if let Some(sum) = place {
                let seal = seal::seal(&unit.groups.shard, &sum.tensor);
                let what = || Label::from(generation.named_as(HELD, index));
                unit.seals.keep(at, seal, what);
            }
        }
        Ok(())
    }

    /// Adds the gradients held back by earlier backwards to `gradients`, from one use of the unit.
    pub(super) fn add_held(
        &mut self,
        audited: &mut Audited,
        (generation, use_id): (&Arc<Generation>, u64),
        gradients: &mut Slots<Gradient>,
    ) -> Result<(), Error> {
        let unit = &generation.unit;
        if let Some(held) = self.held.remove(&unit.position()) {
            let places = gradients.iter_mut().zip(held).zip(&unit.slots);
            for (index, ((place, held), slot)) in places.enumerate() {
                let Some(held) = held else { continue };
                let at = seal::place(index, RestKind::HeldBack);
                seal::check(&unit.seals, at, &held.tensor)?;
                unit.seals.set(at, None);
                if let Some(gradient) = place {
                    let tensor = gradient.tensor.clone();
                    gradient.tensor = cast(tensor, slot.elements.reduce.dtype);
                }
                held.add_to(place);
                audited.added(unit, index, Station::HeldBack, Station::Use(use_id));
            }
        }
        Ok(())
    }

    /// Returns true if gradients of a unit wait for a reduction in this backward. Gradients that wait in the shards
    /// count only if `is_last` and the unit may deliver reduced gradients.
    pub(super) fn wait_for(&self, unit: &Unit, is_last: bool) -> bool {
        let index = unit.position();
        let is_due = is_last && unit.crosses() && self.partial.contains_key(&index);
        unit.syncs() && (is_due || self.held.contains_key(&index))
    }

    /// Returns the total bytes of held-back gradients.
    pub(super) fn held_bytes(&self) -> usize {
        let held = self.held.values().flat_map(|held| held.iter()).flatten();
        held.map(|gradient| gradient.account.len()).sum()
    }

    /// Returns the entry for a unit whose backward has ended, and creates it if necessary.
    fn ended(&mut self, generation: &Arc<Generation>) -> &mut Ended {
        let known = self
            .ended
            .iter()
            .position(|ended| Arc::ptr_eq(&ended.generation, generation));
        let index = known.unwrap_or_else(|| {
            self.ended.push(Ended {
                generation: generation.clone(),
                whole: generation.unit.empty_slots(),
            });
            self.ended.len() - 1
        });
        &mut self.ended[index]
    }

    /// Sets aside the gradients of parameters kept whole, which are reduced at the end of backward.
    pub(super) fn keep_whole(
        &mut self,
        audited: &mut Audited,
        (generation, use_id): (&Arc<Generation>, u64),
        gradients: &mut [Option<Gradient>],
    ) {
        let whole = &mut self.ended(generation).whole;
        for slot in generation.whole_slots() {
            if let Some(gradient) = gradients[slot].take() {
                let to = generation.unit.slots[slot].elements.reduce.dtype;
                // Held-back gradients already have the type in which they are reduced.
                whole[slot] = Some(match whole[slot].take() {
                    Some(earlier) => cast(earlier, to) + cast(gradient.tensor, to),
                    None => gradient.tensor,
                });
                let ended = Station::Ended(generation.seals.number());
                audited.added(&generation.unit, slot, Station::Use(use_id), ended);
            }
        }
    }
}

impl Gradient {
    /// Adds the gradient to the one in `place`, if there is one.
    pub(super) fn add_to(self, place: &mut Option<Self>) {
        *place = Some(match place.take() {
            Some(earlier) => Self {
                tensor: earlier.tensor + self.tensor,
                account: earlier.account,
            },
            None => self,
        });
    }
}
