//! Engines from outside that wrap the group's own: what they change, and what happens if they break their contract.

use std::sync::Arc;

use burn_fsdp_collectives::engine::{
    Awaited, Claim, Completion, Control, Engine, Findings, Flight, Meeting, Messages, Request,
    Stopped, Subgroup,
};
use burn_fsdp_collectives::{
    Buffer, BufferPool, Check, ElementType, Error, FullPart, LaunchConfig, Operation, ProcessGroup,
    Reduction, Source, launch,
};

/// What an engine does to the result of an operation.
type Change = fn(Vec<Buffer>) -> Result<Vec<Buffer>, Stopped>;

/// An engine that changes the results of another.
#[derive(Debug)]
struct Decorated {
    inner: Box<dyn Engine>,
    change: Change,
}

struct Changed {
    inner: Box<dyn Flight>,
    change: Change,
}

impl Messages for Decorated {
    fn control(&self) -> &Arc<Control> {
        self.inner.control()
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        self.inner.post(operation, claim)
    }
}

impl Engine for Decorated {
    fn name(&self) -> &'static str {
        "decorated"
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let (inner, change) = (self.inner.start(request), self.change);
        Box::new(Changed { inner, change })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        let (inner, change) = (self.inner.split(subgroup), self.change);
        Box::new(Self { inner, change })
    }
}

impl Flight for Changed {
    fn meeting(&self) -> &dyn Meeting {
        self.inner.meeting()
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        self.inner.is_there(awaited)
    }

    fn missing(&self, awaited: Awaited) -> Vec<usize> {
        self.inner.missing(awaited)
    }

    fn begin(&mut self) -> Result<(), Stopped> {
        self.inner.begin()
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        match self.inner.receive()? {
            Completion::Done(buffers) => Ok(Completion::Done((self.change)(buffers)?)),
            other => Ok(other),
        }
    }

    /// Not the inner engine's, which has read other bytes.
    fn findings(&mut self) -> Findings {
        Findings::default()
    }
}

fn all_reduce(group: &ProcessGroup, label: &'static str) -> Result<Vec<u8>, Error> {
    let part = FullPart::new(Source::new(vec![group.rank() as u8; 5]), ElementType::U8);
    let into = vec![group.pool().take(5)];
    let reduced = group.all_reduce(label, vec![], Reduction::sum(), vec![part], into)?;
    Ok(reduced.buffers[0].as_ref().to_vec())
}

/// Runs an all-reduce followed by another operation. The engine changes the results of the rank `odd`.
fn reduce_and_continue(
    size: usize,
    check: Check,
    (odd, change): (usize, Change),
) -> Vec<Result<(), Error>> {
    let body = move |world: ProcessGroup| {
        let change = if world.rank() == odd { change } else { Ok };
        let group = world.on_engine("odd", |inner, _| Box::new(Decorated { inner, change }))?;
        group.begin_step(4);
        let reduced = all_reduce(&group, "summed").and_then(|_| group.barrier("after it"));
        Ok::<_, Error>(reduced)
    };
    launch(LaunchConfig::new(size).check(check), body).unwrap()
}

#[test]
fn a_result_that_only_one_rank_holds_is_named_in_the_next_operation() {
    let spoil: Change = |mut buffers| {
        buffers[0].as_mut()[2] ^= 1;
        Ok(buffers)
    };
    for (size, odd) in [(2, vec![0, 1]), (3, vec![1]), (4, vec![1])] {
        for seen in reduce_and_continue(size, Check::Agreement, (1, spoil)) {
            match seen.unwrap_err() {
                Error::Disagreement {
                    operation,
                    step,
                    ranks,
                    ..
                } => {
                    assert_eq!((operation.label.as_str(), step), ("summed", Some(4)));
                    assert_eq!(ranks, odd);
                }
                Error::PeerFailed { reason, .. } => {
                    assert!(reason.contains(&format!("ranks {odd:?} hold")), "{reason}");
                }
                other => panic!("{other}"),
            }
        }
        let right = reduce_and_continue(size, Check::Agreement, (1, Ok));
        assert!(right.iter().all(Result::is_ok), "{right:?}");
    }
}

#[test]
fn an_engine_that_returns_other_buffers_is_named() {
    let changes: [(Change, &str); 3] = [
        (
            |_| Ok(Vec::new()),
            "should have returned 1 buffers for all_reduce \"summed\"",
        ),
        (
            |_| Ok(vec![BufferPool::new().take(4)]),
            "returned 4 bytes in host memory for buffer 0",
        ),
        (
            |_| Err(Stopped::Withdrawn),
            "a withdrawal before any rank has failed",
        ),
    ];
    for (change, words) in changes {
        let seen = reduce_and_continue(3, Check::Calls, (1, change));
        let Err(error @ Error::Engine { rank: 1, .. }) = &seen[1] else {
            panic!("{seen:?}");
        };
        let text = error.to_string();
        assert!(text.contains("rank 1: engine `decorated`"), "{text}");
        assert!(text.contains(words), "{text}");
        // The others hear of it in the next operation at the latest.
        assert!(seen[0].is_err() && seen[2].is_err(), "{seen:?}");
    }
}

#[test]
fn ranks_with_different_engines_are_told() {
    let body = |world: ProcessGroup| {
        let group = world.on_engine("mixed", |inner, group| match group.rank {
            0 => inner,
            _ => Box::new(Decorated { inner, change: Ok }),
        });
        Ok::<_, Error>(group.map(|_| ()))
    };
    for seen in launch(LaunchConfig::new(2), body).unwrap() {
        let text = seen.unwrap_err().to_string();
        assert!(text.contains("on engine local"), "{text}");
        assert!(text.contains("on engine decorated"), "{text}");
    }
}
