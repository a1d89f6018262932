//! The prompts that wait, and the ranks that continue them.

use std::ops::Range;

/// The distribution of prompts among ranks. All ranks have equal queues.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: Range<usize>,
    /// The number of prompts that each rank continues.
    active: Vec<usize>,
    /// Most prompts that all ranks together continue at once.
    batch: usize,
}

/// The state of a rank after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Note {
    /// True if the rank was asked to stop.
    pub(super) is_stopped: bool,
    /// True if the rank's logits are not valid numbers.
    pub(super) has_failed: bool,
    /// The number of prompts that the rank still continues.
    pub(super) num_active: usize,
    /// The hash of the tokens that the rank chose.
    pub(super) chosen: u64,
}

impl Queue {
    /// Creates the queue of `num_prompts` prompts for `ranks` ranks.
    pub(super) fn new(num_prompts: usize, ranks: usize, batch: usize) -> Self {
        Self {
            waiting: 0..num_prompts,
            active: vec![0; ranks],
            batch: batch.max(1),
        }
    }

    /// Returns true if every prompt has been continued to its end.
    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.active.iter().all(|active| *active == 0)
    }

    /// Records the states of all ranks, in order.
    pub(super) fn update(&mut self, notes: &[Note]) {
        for (active, note) in self.active.iter_mut().zip(notes) {
            *active = note.num_active;
        }
    }

    /// Distributes waiting prompts, each to the rank with the fewest, and returns those for `rank`. Every rank calls this,
    /// so the queues remain equal.
    pub(super) fn next(&mut self, rank: usize) -> Vec<usize> {
        let mut own = Vec::new();
        while self.active.iter().sum::<usize>() < self.batch {
            let ranks = self.active.iter_mut().enumerate();
            let Some((idlest, active)) = ranks.min_by_key(|(_, active)| **active) else {
                break;
            };
            let Some(prompt) = self.waiting.next() else {
                break;
            };
            *active += 1;
            if idlest == rank {
                own.push(prompt);
            }
        }
        own
    }
}

impl Note {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let flags = [u8::from(self.is_stopped), u8::from(self.has_failed)];
        let numbers = [self.num_active as u64, self.chosen];
        let numbers = numbers.map(u64::to_le_bytes);
        [&flags[..], &numbers.concat()].concat()
    }

    /// Reads a note. One that cannot be read is that of a failed rank.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let read = || {
            let (flags, numbers) = bytes.split_first_chunk::<2>()?;
            let (count, chosen) = numbers.split_first_chunk::<8>()?;
            Some(Self {
                is_stopped: flags[0] == 1,
                has_failed: flags[1] == 1,
                num_active: u64::from_le_bytes(*count) as usize,
                chosen: u64::from_le_bytes(chosen.try_into().ok()?),
            })
        };
        read().unwrap_or(Self {
            is_stopped: false,
            has_failed: true,
            num_active: 0,
            chosen: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Note, Queue};

    #[test]
    fn each_waiting_prompt_goes_to_the_rank_with_the_fewest() {
        let mut queues: Vec<_> = (0..3).map(|_| Queue::new(7, 3, 5)).collect();
        let next = |queues: &mut Vec<Queue>| {
            let own = queues.iter_mut().enumerate();
            own.map(|(rank, queue)| queue.next(rank))
                .collect::<Vec<_>>()
        };
        let none: Vec<usize> = Vec::new();
        assert_eq!(next(&mut queues), [vec![0, 3], vec![1, 4], vec![2]]);
        assert_eq!(
            next(&mut queues),
            [none.clone(), none.clone(), none.clone()],
            "the batch is full"
        );
        let update = |queues: &mut Vec<Queue>, active: [usize; 3]| {
            let notes = active.map(|num_active| Note {
                is_stopped: false,
                has_failed: false,
                num_active,
                chosen: 7,
            });
            let notes = notes.map(|note| Note::of(&note.to_bytes()));
            queues.iter_mut().for_each(|queue| queue.update(&notes));
        };
        update(&mut queues, [2, 0, 1]);
        assert_eq!(next(&mut queues), [none.clone(), vec![5, 6], none]);
        assert!(!queues[0].is_done());
        update(&mut queues, [0, 0, 0]);
        assert!(queues.iter().all(Queue::is_done));
        assert!(Note::of(b"").has_failed);
    }
}
