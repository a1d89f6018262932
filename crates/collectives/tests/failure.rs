//! Ranks that panic, fail, stall or leave: the others are told, and nothing hangs.

mod ranks;

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_fsdp_collectives::{
    At, Error, Fault, How, LaunchConfig, LaunchError, ProcessGroup, Reduction, Stage,
};
use ranks::{LONG, SHORT, counting, fail, full, gather, observe};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// The errors that the library traces, from all threads of this process.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

/// The fields of an event.
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, "{}: {value:?}, ", field.name()).expect("a text takes it");
    }
}

impl Subscriber for Heard {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::ERROR && metadata.target() == "burn_fsdp"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        self.0.lock().unwrap().push(fields.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Returns the error that rank 0 gets from `call` when rank 1 of 2 first does `instead`.
fn rank_0_sees(
    deadline: Duration,
    instead: impl Fn(&ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
    call: impl Fn(&ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
) -> Error {
    let heard = Arc::new(Mutex::new(None));
    let ear = heard.clone();
    let config = LaunchConfig::new(2).deadline(deadline).grace(SHORT);
    let _ = burn_fsdp_collectives::launch(config, move |world| {
        if world.rank() == 1 {
            return instead(&world);
        }
        let result = call(&world);
        *ear.lock().unwrap() = Some(result.clone());
        result
    });
    let heard = heard.lock().unwrap().take();
    heard
        .expect("rank 0 came to its end")
        .expect_err("rank 1 did not take part")
}

/// A call of a rank on its group.
type Call = fn(&ProcessGroup) -> Result<(), Error>;

fn every_call() -> Vec<Call> {
    vec![
        |world| gather(world, "x", 5).map(|_| ()),
        |world| world.barrier("x"),
        |world| world.exchange("x", vec![1]).map(|_| ()),
        |world| {
            let into = vec![world.pool().take(20)];
            let part = vec![full(world, 5)];
            world
                .all_reduce("x", vec![], Reduction::sum(), part, into)
                .map(|_| ())
        },
        |world| world.split(0, 0, "x").map(|_| ()),
        |world| {
            let pending = world.join_all_gather("x", vec![], vec![counting(world, 5)])?;
            pending.wait_released().map(|_| ())
        },
    ]
}

#[test]
fn a_panic_reaches_every_kind_of_call() {
    for call in every_call() {
        let error = rank_0_sees(LONG, |_| panic!("out of luck"), call);
        let Error::PeerFailed {
            rank,
            reason,
            operation,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (*rank, reason.as_str(), operation.sequence),
            (1, "panicked: out of luck", 0)
        );
        let message = error.to_string();
        assert!(
            message.contains("cannot complete because rank 1 failed"),
            "{message}"
        );
        assert!(message.contains("rank 1: none"), "{message}");
    }
}

/// Any thread may be the one that traces the failure, so the subscriber hears all threads.
#[test]
fn a_failed_rank_is_traced_once_with_its_reason() {
    let heard = Heard::default();
    tracing::subscriber::set_global_default(heard.clone()).expect("no other test sets one");
    rank_0_hears(LONG, |_| panic!("traced once"), |world| world.barrier("x"));
    let events = heard.0.lock().unwrap().clone();
    let own: Vec<_> = (events.iter())
        .filter(|event| event.contains("traced once"))
        .collect();
    assert_eq!(own.len(), 1, "{events:?}");
    for part in [
        "message: a rank failed",
        "rank: 1",
        "reason: panicked: traced once",
    ] {
        assert!(own[0].contains(part), "{part} in {own:?}");
    }
}

#[test]
fn an_error_reaches_the_peers_with_its_text() {
    let instead = |_: &ProcessGroup| {
        Err(Error::from(
            burn_fsdp_collectives::Mesh::line("x", 0).unwrap_err(),
        ))
    };
    let error = rank_0_sees(LONG, instead, |world| world.barrier("x"));
    let message = error.to_string();
    assert!(
        message.contains("rank 1 failed: mesh axis \"x\" has size 0"),
        "{message}"
    );
}

#[test]
fn a_rank_that_returns_early_is_named() {
    for call in every_call() {
        let error = rank_0_sees(LONG, |_| Ok(()), call);
        assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("rank 1 returned without starting"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_stalls_is_named_after_the_deadline() {
    let stall = |world: &ProcessGroup| {
        world.barrier("first")?;
        Fault::parse("rank:1,step:0,at:forward,how:stall").map(|fault| world.set_fault(fault))?;
        world.begin_step(0);
        world.fault_point(At::Forward)
    };
    let error = rank_0_sees(SHORT, stall, |world| {
        world.barrier("first")?;
        gather(world, "x", 5).map(|_| ())
    });
    let Error::Timeout {
        rank: 0,
        missing,
        stage,
        operation,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (missing.as_slice(), *stage, operation.sequence),
        ([1].as_slice(), Stage::Start, 1)
    );
    let message = error.to_string();
    assert!(
        message.starts_with("rank 0 waited 2s for ranks [1] to start all_gather \"x\""),
        "{message}"
    );
    assert!(message.contains("rank 1: barrier \"first\""), "{message}");
}

#[test]
fn a_peer_that_does_not_finish_is_named_after_the_deadline() {
    let (gave_up, has_given_up) = std::sync::mpsc::channel();
    let has_given_up = std::sync::Mutex::new(has_given_up);
    let seen = observe(2, SHORT, move |world| {
        let pending = world.join_all_gather("x", vec![], vec![counting(&world, 5)])?;
        if world.rank() == 0 {
            let result = pending.wait_released().map(|_| ());
            gave_up.send(()).unwrap();
            return result;
        }
        // Started, not finished, and busy elsewhere.
        has_given_up.lock().unwrap().recv().unwrap();
        pending.wait()?;
        world.barrier("after")
    });
    let error = seen[0].as_ref().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Timeout {
                stage: Stage::Finish,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("for ranks [1] to finish all_gather"),
        "{error}"
    );
    let error = seen[1].as_ref().unwrap_err();
    assert!(
        matches!(error, Error::PeerFailed { rank: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_chain_of_waits_is_followed_to_its_end() {
    let (gave_up, has_given_up) = std::sync::mpsc::channel();
    let has_given_up = std::sync::Mutex::new(has_given_up);
    let seen = observe(3, SHORT, move |world| {
        let pair = world.split(usize::from(world.rank() > 0), 0, "pair")?;
        // Long enough that rank 0's deadline passes first.
        let pair = pair.isolate("patient", 4 * SHORT)?;
        match world.rank() {
            0 => {
                let result = world.barrier("all");
                gave_up.send(()).unwrap();
                result
            }
            1 => pair.barrier("two"),
            _ => {
                has_given_up.lock().unwrap().recv().unwrap();
                Ok(())
            }
        }
    });
    let error = seen[0].as_ref().unwrap_err();
    let Error::Timeout { missing, ends, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        (missing.as_slice(), ends.as_slice()),
        (&[1, 2][..], &[2][..])
    );
    assert!(
        error.to_string().contains(
            "(operation 1 of group \"world\"), and ultimately for ranks [2], which wait for no other rank;"
        ),
        "{error}"
    );
}

#[test]
fn deadlocked_ranks_are_reported() {
    let seen = observe(2, SHORT, |world| {
        let groups = [world.isolate("a", SHORT)?, world.isolate("b", 2 * SHORT)?];
        groups[world.rank()].barrier("x")
    });
    let error = seen[0].as_ref().unwrap_err();
    assert!(
        error
            .to_string()
            .contains(", which all wait for each other;"),
        "{error}"
    );
}

#[test]
fn a_failure_reaches_pending_operations_and_other_groups() {
    let seen = observe(3, LONG, |world| {
        let pair = world.split(usize::from(world.rank() == 2), 0, "pair")?;
        if world.rank() == 2 {
            world.set_fault(Fault::parse("rank:2,step:1,at:collective,how:error")?);
            world.begin_step(1);
            let error = world.barrier("never").unwrap_err();
            assert!(matches!(error, Error::Injected { .. }), "{error}");
            // Rank 1 continues, but too late: the others have given up.
            return Err(error);
        }
        let pending = world.start_barrier("never")?;
        if world.rank() == 0 {
            pending.wait()?;
        }
        // Rank 0 has returned; rank 1 now waits for it in the pair.
        pair.barrier("pair")
    });
    assert!(seen.iter().all(Result::is_err), "{seen:?}");
}

#[test]
fn the_first_cause_is_reported() {
    let config = LaunchConfig::new(4).deadline(LONG);
    let error = fail(config, |world| {
        if world.rank() == 2 {
            panic!("the first");
        }
        world.barrier("x")
    });
    let LaunchError::Panicked {
        rank: 2,
        message,
        abandoned,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((message.as_str(), abandoned.len()), ("the first", 0));
    assert_eq!(error.to_string(), "rank 2 panicked: the first");
}

#[test]
fn the_first_cause_is_reported_for_an_expired_deadline() {
    let config = LaunchConfig::new(3).deadline(SHORT).grace(SHORT);
    let error = fail(config, |world| {
        if world.rank() == 1 {
            std::thread::sleep(LONG);
        }
        world.barrier("x")
    });
    let LaunchError::Failed {
        rank: 0 | 2,
        source,
        abandoned,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(abandoned, &[1]);
    assert!(
        source
            .to_string()
            .contains("for ranks [1] to start barrier \"x\""),
        "{source}"
    );
    assert!(
        error
            .to_string()
            .ends_with("ranks [1] did not return after that and were abandoned")
    );
}

#[test]
fn faults_trigger_once_at_their_place() {
    for (at, how) in [
        (At::Forward, How::Error),
        (At::Backward, How::Panic),
        (At::Collective, How::Error),
    ] {
        let config = LaunchConfig::new(2).deadline(LONG);
        let error = fail(config, move |world| {
            world.set_fault(Fault::new(1, 2, at, how));
            for step in 0..4 {
                world.begin_step(step);
                world.fault_point(At::Forward)?;
                gather(&world, &format!("step {step}"), 3)?;
                world.fault_point(At::Backward)?;
            }
            Ok(())
        });
        let message = error.to_string();
        assert!(message.starts_with("rank 1 "), "{message}");
        assert!(
            message.contains(&format!("rank:1,step:2,at:{at},how:{how}")),
            "{message}"
        );
    }
}

#[test]
fn faults_that_cannot_be_read_are_explained() {
    let problem = |text: &str| match Fault::parse(text).unwrap_err() {
        Error::InvalidFault { problem, .. } => problem,
        error => panic!("{error}"),
    };
    assert_eq!(problem(""), "\"\" has no colon");
    assert_eq!(problem("rank:1"), "step is missing");
    assert_eq!(
        problem("rank:-1"),
        "rank is \"-1\", which is not a number of at least 0"
    );
    assert_eq!(problem("rank:1,rank:2"), "rank is given twice");
    assert_eq!(problem("where:here"), "\"where\" is not a known key");
    assert_eq!(
        problem("at:noon"),
        "at is \"noon\", which is not a known place"
    );
    assert_eq!(
        problem("how:softly"),
        "how is \"softly\", which is not a known kind of failure"
    );
    let text = "rank:1,step:3,at:backward,how:stall";
    assert_eq!(Fault::parse(text).unwrap().to_string(), text);
    let shuffled = " how:stall, at:backward ,step:3,rank:1";
    assert_eq!(Fault::parse(shuffled).unwrap(), Fault::parse(text).unwrap());
    let message = Fault::parse("rank:1").unwrap_err().to_string();
    assert!(message.ends_with(&format!("write it as {}", Fault::SYNTAX)));
}

#[test]
fn memory_shared_with_peers_is_released_on_failure() {
    let seen = observe(2, LONG, |world| {
        if world.rank() == 1 {
            let into = vec![world.pool().take(400)];
            let shown = burn_fsdp_collectives::Source::new(world.pool().take(400));
            let part = burn_fsdp_collectives::FullPart::new(
                shown,
                burn_fsdp_collectives::ElementType::F32,
            );
            let pending =
                world.start_all_reduce("x", vec![], Reduction::sum(), vec![part], into)?;
            let error = pending.wait().unwrap_err();
            assert!(matches!(error, Error::PeerLeft { rank: 0, .. }), "{error}");
        }
        Ok(world.pool().live_bytes())
    });
    assert_eq!(
        seen.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
        [0, 0]
    );
}
