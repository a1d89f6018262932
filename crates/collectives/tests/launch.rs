//! Starting ranks and hearing how they ended.

mod ranks;

use burn_fsdp_collectives::{Error, LaunchConfig, LaunchError, Unwound, launch};
use ranks::{LONG, SHORT, fail, run};

#[test]
fn results_come_in_rank_order() {
    let results = run(4, |world| {
        // The last rank returns first.
        std::thread::sleep(std::time::Duration::from_millis(
            5 * (4 - world.rank() as u64),
        ));
        Ok((
            world.rank(),
            world.world_rank(),
            world.size(),
            world.name().to_owned(),
        ))
    });
    let expected: Vec<_> = (0..4)
        .map(|rank| (rank, rank, 4, "world".to_owned()))
        .collect();
    assert_eq!(results, expected);
}

#[test]
fn refuses_no_ranks() {
    let error = fail(LaunchConfig::new(0), |_| Ok(()));
    assert!(matches!(error, LaunchError::NoRanks));
    assert_eq!(
        error.to_string(),
        "cannot launch 0 ranks; ask for at least one"
    );
}

#[test]
fn every_rank_has_its_own_threads() {
    let config = LaunchConfig::new(2).threads_per_rank(3);
    let threads = launch(config, |_| Ok::<_, Error>(rayon::current_num_threads())).unwrap();
    assert_eq!(threads, [3, 3]);
    let cores = std::thread::available_parallelism().unwrap().get();
    let threads = run(2, |_| Ok(rayon::current_num_threads()));
    assert_eq!(threads, [(cores / 2).max(1); 2]);
    let threads = run(64, |_| Ok(rayon::current_num_threads()));
    assert_eq!(threads, [(cores / 64).max(1); 64]);
}

#[test]
fn an_error_keeps_its_type() {
    let error = launch(LaunchConfig::new(2), |world| match world.rank() {
        1 => Err(std::io::Error::other("disk full")),
        _ => Ok(()),
    });
    let Err(LaunchError::Failed {
        rank: 1,
        source,
        abandoned,
    }) = error
    else {
        panic!("{error:?}")
    };
    assert_eq!(
        source.downcast_ref::<std::io::Error>().unwrap().to_string(),
        "disk full"
    );
    assert!(abandoned.is_empty());
}

#[test]
fn panics_of_every_payload_keep_their_message() {
    let message = |body: fn()| {
        let error = fail(LaunchConfig::new(2), move |world| {
            if world.rank() == 1 {
                body();
            }
            world.barrier("x")
        });
        error.to_string()
    };
    assert_eq!(message(|| panic!("static")), "rank 1 panicked: static");
    assert_eq!(
        message(|| panic!("formatted {}", 1)),
        "rank 1 panicked: formatted 1"
    );
    assert_eq!(
        message(|| std::panic::resume_unwind(Box::new(7))),
        "rank 1 panicked: a payload that is not text"
    );
    assert_eq!(
        message(|| std::panic::resume_unwind(Box::new(Unwound("typed".into())))),
        "rank 1 failed: typed"
    );
    type BoxError = Box<dyn std::error::Error + Send + Sync>;
    assert_eq!(
        message(|| std::panic::resume_unwind(Box::new(BoxError::from("boxed")))),
        "rank 1 failed: boxed"
    );
}

#[test]
fn ranks_that_do_not_return_are_abandoned() {
    let config = LaunchConfig::new(3).deadline(LONG).grace(SHORT);
    let error = fail(config, |world| match world.rank() {
        0 => Err(burn_fsdp_collectives::Mesh::line("x", 0)
            .unwrap_err()
            .into()),
        1 => {
            std::thread::sleep(LONG);
            Ok(())
        }
        _ => Ok(()),
    });
    let LaunchError::Failed {
        rank: 0, abandoned, ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(abandoned, [1]);
}

#[test]
fn a_stalled_rank_is_abandoned_also_if_its_peers_keep_quiet() {
    let config = LaunchConfig::new(2).deadline(SHORT).grace(SHORT);
    let error = fail(config, |world| {
        if world.rank() == 1 {
            std::thread::sleep(LONG);
        }
        // An error that nobody returns.
        let _ = world.barrier("x");
        Ok(())
    });
    let LaunchError::Failed {
        rank: 0, abandoned, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(abandoned, &[1]);
    assert!(
        error.to_string().contains("waited 200ms for ranks [1]"),
        "{error}"
    );
}

#[test]
fn errors_dealt_with_are_none() {
    let seen = run(2, |world| {
        let label = if world.rank() == 0 { "a" } else { "b" };
        Ok(world.barrier(label).is_err())
    });
    assert_eq!(seen, [true, true]);
}

#[test]
fn worlds_do_not_meet() {
    let outer = std::thread::spawn(|| run(2, |world| ranks::gather(&world, "x", 5)));
    let failed = fail(LaunchConfig::new(2), |world| match world.rank() {
        0 => panic!("elsewhere"),
        _ => world.barrier("x"),
    });
    assert!(failed.to_string().contains("elsewhere"));
    assert_eq!(
        outer.join().unwrap(),
        vec![vec![0.0, 1.0, 2.0, 3.0, 4.0]; 2]
    );
}

#[test]
fn handles_go_between_threads() {
    fn sends<T: Send>() {}
    fn shares<T: Send + Sync>() {}
    use burn_fsdp_collectives as c;
    shares::<(
        c::ProcessGroup,
        c::ProcessMesh,
        c::Source,
        c::Buffer,
        c::BufferPool,
    )>();
    shares::<(Error, LaunchError, c::Ledger, c::Account)>();
    sends::<(c::Pending, c::Pending<()>, c::Received)>();
}
