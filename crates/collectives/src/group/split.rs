//! Groups created from other groups.

use std::sync::Arc;
use std::time::Duration;

use super::process_group::ProcessGroup;
use burn_fsdp_rendezvous::{Error, Label, Subgroup};
use burn_fsdp_transport::Engine;

impl ProcessGroup {
    /// Divides the group. Ranks that pass the same `color` form a new group, ordered by `key`, and by their rank in
    /// this group if keys are equal. Collective; `name` must be the same on all ranks, even for different colors.
    ///
    /// # Errors
    ///
    /// Same as [`barrier`](Self::barrier).
    pub fn split(
        &self,
        color: usize,
        key: usize,
        name: impl Into<Label>,
    ) -> Result<ProcessGroup, Error> {
        let name = name.into();
        let label = format!("split into {}", name.as_str());
        let choices = self.choose(label, color, key)?;
        let of_color = |(rank, choice): (usize, &Choice)| {
            (choice.color == color).then_some((choice.key, rank))
        };
        let mut members: Vec<_> = choices.iter().enumerate().filter_map(of_color).collect();
        members.sort_unstable();
        let members = members.into_iter().map(|(_, rank)| rank).collect();
        Ok(self.form(name, members, &choices, None, |engine, _| engine))
    }

    /// Creates a group of the same ranks that fails independently. A mismatch, a rank that leaves, or a rank that does
    /// not arrive within `deadline` ends only the operations of this group and of groups [`split`](Self::split) off it.
    /// The parent group continues. Use an isolated group for work in parallel to the main work, such as checkpoints
    /// written in the background. A slow disk then costs a checkpoint, not the run.
    ///
    /// There is no isolation in the other direction: this group fails when the world or an isolated group that it was
    /// created from fails.
    ///
    /// A group that has failed stays failed. To start again, create another one from a group that still works.
    /// `deadline` replaces the deadline of [`LaunchConfig`](crate::LaunchConfig); [`Duration::MAX`] means none.
    /// Collective; name and deadline must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// Same as [`barrier`](Self::barrier).
    ///
    /// ```
    /// use std::time::Duration;
    /// use burn_fsdp_collectives::{Error, LaunchConfig, ProcessGroup, launch};
    ///
    /// fn body(world: ProcessGroup) -> Result<(), Error> {
    ///     let saves = world.isolate("saves", Duration::from_millis(50))?;
    ///     if world.rank() == 0 {
    ///         assert!(saves.barrier("nobody else comes").is_err());
    ///     }
    ///     world.barrier("all the same")
    /// }
    ///
    /// launch(LaunchConfig::new(2), body)?;
    /// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
    /// ```
    pub fn isolate(
        &self,
        name: impl Into<Label>,
        deadline: Duration,
    ) -> Result<ProcessGroup, Error> {
        let name = name.into();
        let label = format!("isolate {} for {deadline:?}", name.as_str());
        let choices = self.choose(label, 0, self.rank())?;
        let members = (0..self.size()).collect();
        Ok(self.form(name, members, &choices, Some(deadline), |engine, _| engine))
    }

    /// Creates a group of the same ranks whose bytes another engine moves. `make` receives an engine like this group's
    /// for the new group, and the description of that group. It returns the engine to use, which may pass operations on
    /// to the first. A program can thus replace some collectives, such as the all-gathers of a module that is sharded
    /// over the group.
    ///
    /// Groups [split](Self::split) off the new group also use that engine. Collective; the names of group and engine
    /// must be the same on all ranks.
    ///
    /// # Errors
    ///
    /// Same as [`barrier`](Self::barrier).
    ///
    /// ```
    /// use burn_fsdp_collectives::{Error, LaunchConfig, ProcessGroup, launch};
    ///
    /// fn body(world: ProcessGroup) -> Result<(), Error> {
    ///     // The same engine again. Create your own engine here.
    ///     let group = world.on_engine("fast", |engine, _| engine)?;
    ///     assert_eq!((group.engine(), group.size()), (world.engine(), world.size()));
    ///     group.barrier("on the engine")
    /// }
    ///
    /// launch(LaunchConfig::new(2), body)?;
    /// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
    /// ```
    pub fn on_engine(
        &self,
        name: impl Into<Label>,
        make: impl FnOnce(Box<dyn Engine>, &Subgroup) -> Box<dyn Engine>,
    ) -> Result<Self, Error> {
        let name = name.into();
        let label = format!("engine of {}", name.as_str());
        let choices = self.choose(label, 0, self.rank())?;
        let members = (0..self.size()).collect();
        let group = self.form(name, members, &choices, None, make);
        // Ranks with different engines would wait for each other's bytes.
        group.barrier(format!("on engine {}", group.engine()))?;
        Ok(group)
    }

    /// Creates a group of these ranks of this group, in this order. All ranks already know the members. Collective;
    /// ranks that are not members create other groups.
    pub(crate) fn split_known(
        &self,
        members: Vec<usize>,
        name: Label,
        label: String,
    ) -> Result<ProcessGroup, Error> {
        let choices = self.choose(label, 0, 0)?;
        Ok(self.form(name, members, &choices, None, |engine, _| engine))
    }

    /// Sends this rank's choice in a split to all ranks and returns the choices of all.
    fn choose(&self, label: String, color: usize, key: usize) -> Result<Vec<Choice>, Error> {
        let own = Choice {
            color,
            key,
            number: self.0.state.next_group(),
        };
        let told = self.exchange(label, own.to_bytes())?;
        Ok(told.iter().map(|bytes| Choice::of_bytes(bytes)).collect())
    }

    /// Creates a group of these ranks of this group, which include this rank.
    fn form(
        &self,
        name: Label,
        members: Vec<usize>,
        choices: &[Choice],
        isolated: Option<Duration>,
        make: impl FnOnce(Box<dyn Engine>, &Subgroup) -> Box<dyn Engine>,
    ) -> ProcessGroup {
        let rank = members
            .iter()
            .take_while(|member| **member != self.0.rank)
            .count();
        let world_ranks = members.iter().map(|member| self.members()[*member]);
        let world_ranks: Arc<[usize]> = world_ranks.collect();
        let subgroup = Subgroup {
            number: choices[members[0]].number,
            members,
            rank,
            isolated,
        };
        let engine = make(self.0.engine.split(subgroup.clone()), &subgroup);
        let own = (self.0.state.clone(), self.0.pool.clone());
        Self::new(name, rank, world_ranks, engine, own)
    }
}

/// The choice of a rank in a split.
struct Choice {
    color: usize,
    key: usize,
    /// The number of the new group, if this rank will be its first.
    number: u64,
}

impl Choice {
    fn to_bytes(&self) -> Vec<u8> {
        let words = [self.color as u64, self.key as u64, self.number];
        words.map(u64::to_le_bytes).concat()
    }

    /// Reads bytes written by another rank of this program.
    fn of_bytes(bytes: &[u8]) -> Self {
        let (words, _) = bytes.as_chunks::<{ size_of::<u64>() }>();
        let word = |index: usize| words.get(index).map_or(0, |word| u64::from_le_bytes(*word));
        Self {
            color: word(0) as usize,
            key: word(1) as usize,
            number: word(2),
        }
    }
}
