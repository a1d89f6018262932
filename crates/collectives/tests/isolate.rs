//! Groups that fail by themselves.

mod ranks;

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_fsdp_collectives::{Error, LaunchConfig, ProcessGroup};
use ranks::{LONG, gather, observe, run};

/// A short deadline that no rank has to meet.
const MOMENT: Duration = Duration::from_millis(50);

#[test]
fn isolated_groups_have_the_same_ranks_and_another_name() {
    let seen = run(3, |world| {
        let beside = world.isolate("saves", LONG)?;
        assert_eq!(beside.name(), "saves");
        assert_eq!((beside.rank(), beside.size()), (world.rank(), world.size()));
        assert_eq!(beside, world);
        gather(&beside, "x", 5)
    });
    assert_eq!(seen, vec![vec![0.0, 1.0, 2.0, 3.0, 4.0]; 3]);
}

#[test]
fn a_missed_deadline_does_not_affect_the_world() {
    let (gave_up, has_given_up) = channel();
    let has_given_up = Arc::new(Mutex::new(has_given_up));
    let seen = run(2, move |world| {
        let saves = world.isolate("saves", MOMENT)?;
        if world.rank() == 1 {
            let error = saves.barrier("saved").unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert!(
                error.to_string().contains("waited 50ms for ranks [0]"),
                "{error}"
            );
            gave_up.send(()).unwrap();
        } else {
            // A slow disk.
            has_given_up.lock().unwrap().recv().unwrap();
            let error = saves.barrier("saved").unwrap_err();
            assert!(
                matches!(error, Error::PeerFailed { rank: 1, .. }),
                "{error}"
            );
        }
        let full = gather(&world, "step", 5)?;
        // Groups split off it fail with it, and a new one does not.
        assert!(saves.barrier("again").is_err());
        world.isolate("saves again", LONG)?.barrier("saved")?;
        Ok(full)
    });
    assert_eq!(seen, vec![vec![0.0, 1.0, 2.0, 3.0, 4.0]; 2]);
}

#[test]
fn a_mismatch_does_not_affect_the_world() {
    run(3, |world| {
        let beside = world.isolate("beside", LONG)?;
        let half = beside.split(world.rank() / 2, 0, "half")?;
        let label = if world.rank() == 0 { "a" } else { "b" };
        let error = beside.barrier(label).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let error = half.barrier("x").unwrap_err();
        assert!(matches!(error, Error::PeerFailed { .. }), "{error}");
        world.barrier("after")
    });
}

#[test]
fn a_failure_outside_ends_the_isolated_group() {
    let seen = observe(2, LONG, |world| {
        let inner = world
            .isolate("outer", LONG)?
            .isolate("inner", Duration::MAX)?;
        if world.rank() == 1 {
            assert!(world.barrier("odd").is_err());
            return inner.barrier("x");
        }
        let pending = inner.start_barrier("x")?;
        assert!(world.barrier("even").is_err());
        pending.wait()
    });
    for result in seen {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::PeerFailed { .. }), "{error}");
    }
}

#[test]
fn a_returned_rank_is_missed_in_the_isolated_group() {
    let seen = observe(2, LONG, |world| {
        let beside = world.isolate("beside", Duration::MAX)?;
        match world.rank() {
            0 => beside.barrier("x"),
            _ => Ok(()),
        }
    });
    let error = seen[0].as_ref().unwrap_err();
    assert!(matches!(error, Error::PeerLeft { rank: 1, .. }), "{error}");
    assert!(seen[1].is_ok());
}

#[test]
fn ranks_must_agree_on_isolating() {
    let seen = observe(2, LONG, |world| {
        world
            .isolate("saves", MOMENT * (1 + world.rank() as u32))
            .map(|_| ())
    });
    for result in seen {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn fake_groups_can_be_isolated() {
    let group = ProcessGroup::fake(4, 1).isolate("saves", MOMENT).unwrap();
    assert_eq!((group.rank(), group.size()), (1, 4));
    group.barrier("x").unwrap();
}

#[test]
fn launches_succeed_despite_a_failed_isolated_group() {
    let config = LaunchConfig::new(2).deadline(LONG).grace(Duration::ZERO);
    let results = burn_fsdp_collectives::launch(config, |world| {
        let beside = world.isolate("beside", LONG)?;
        let label = if world.rank() == 0 { "a" } else { "b" };
        assert!(beside.barrier(label).is_err());
        Ok::<_, Error>(world.rank())
    });
    assert_eq!(results.unwrap(), [0, 1]);
}
