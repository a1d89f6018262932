//! Starting ranks, and the outcomes of launches.

mod ranks;

use burn_fsdp_collectives::{
    Error, LaunchConfig, LaunchError, Unwound, launch, launcher_ranks, processes,
};
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
        "cannot launch 0 ranks; request at least one"
    );
}

#[test]
fn every_rank_has_its_own_threads() {
    let config = LaunchConfig::new(2).threads_per_rank(3);
    let threads = launch(config, |_| Ok::<_, Error>(rayon::current_num_threads())).unwrap();
    assert_eq!(threads, [3, 3]);
    let cores = std::thread::available_parallelism().unwrap().get();
    // A rank with one thread also has a background worker.
    let threads = run(2, |_| Ok(rayon::current_num_threads()));
    assert_eq!(threads, [(cores / 2).max(2); 2]);
    let threads = run(64, |_| Ok(rayon::current_num_threads()));
    assert_eq!(threads, [(cores / 64).max(2); 64]);
}

/// Runs a test of this file again, in a process with these variables, as if a launcher had started it. Returns false in
/// that process.
fn played_with(test: &str, variables: &[(&str, &str)]) -> bool {
    const PLAYED: &str = "BURN_FSDP_TEST_PLAYED";
    if std::env::var_os(PLAYED).is_some() {
        return false;
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", test])
        .env(PLAYED, "")
        .envs(variables.iter().copied());
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
    true
}

#[test]
fn one_of_several_processes_of_another_launcher_is_refused() {
    let torchrun = [("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")];
    let test = "one_of_several_processes_of_another_launcher_is_refused";
    if played_with(test, &torchrun) {
        return;
    }
    assert_eq!(launcher_ranks(), None);
    let errors = [
        processes().unwrap_err(),
        fail(LaunchConfig::new(2), |_| Ok(())),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(
            matches!(
                error,
                LaunchError::OtherLauncher {
                    processes: Some(2),
                    ..
                }
            ),
            "{message}"
        );
        assert!(message.contains("WORLD_SIZE=2"), "{message}");
    }
}

#[test]
fn rayons_variable_is_the_number_of_threads_of_a_rank() {
    let test = "rayons_variable_is_the_number_of_threads_of_a_rank";
    if played_with(test, &[("RAYON_NUM_THREADS", "5")]) {
        return;
    }
    assert_eq!(run(2, |_| Ok(rayon::current_num_threads())), [5, 5]);
    let config = LaunchConfig::new(2).threads_per_rank(3);
    let threads = launch(config, |_| Ok::<_, Error>(rayon::current_num_threads())).unwrap();
    assert_eq!(threads, [3, 3]);
}

#[test]
fn a_non_numeric_rayon_variable_is_rejected() {
    let test = "a_non_numeric_rayon_variable_is_rejected";
    if played_with(test, &[("RAYON_NUM_THREADS", "all")]) {
        return;
    }
    let message = fail(LaunchConfig::new(2), |_| Ok(())).to_string();
    assert!(
        message.contains("RAYON_NUM_THREADS is \"all\""),
        "{message}"
    );
}

#[test]
fn refuses_more_threads_than_a_rank_should_have() {
    let message = fail(LaunchConfig::new(2).threads_per_rank(5_000), |_| Ok(())).to_string();
    assert!(
        message.starts_with("cannot give each rank 5000 threads; request at most"),
        "{message}"
    );
}

#[test]
fn thread_counts_are_exact_without_a_background() {
    for (threads, expected) in [(1, 1), (2, 2)] {
        let config = LaunchConfig::new(3)
            .threads_per_rank(threads)
            .without_background();
        let found = launch(config, |world| {
            world.barrier("all are there")?;
            Ok::<_, Error>(rayon::current_num_threads())
        });
        assert_eq!(found.unwrap(), [expected; 3]);
    }
}

#[test]
fn background_work_runs_while_the_body_waits() {
    for threads in [1, 2] {
        let config = LaunchConfig::new(2).threads_per_rank(threads);
        let heard = launch(config, |world| {
            let mut heard = Vec::new();
            for batch in 0..3 {
                let (send, receive) = std::sync::mpsc::channel();
                rayon::spawn(move || send.send(batch).unwrap());
                heard.push(receive.recv_timeout(LONG).expect("the spawned job ran"));
                ranks::gather(&world, "x", 5)?;
            }
            Ok::<_, Error>(heard)
        });
        assert_eq!(heard.unwrap(), vec![vec![0, 1, 2]; 2]);
    }
}

#[test]
fn a_background_loader_may_run_forever() {
    let config = LaunchConfig::new(2).threads_per_rank(1);
    let sums = launch(config, |world| {
        let (send, batches) = std::sync::mpsc::sync_channel(1);
        rayon::spawn(move || while send.send([1.5f32; 8]).is_ok() {});
        let mut sum = 0.0;
        for _ in 0..5 {
            let batch = batches.recv_timeout(LONG).expect("the loader runs");
            // Parallel work of the body, which does not wait for the loader.
            use rayon::prelude::*;
            sum += batch.par_iter().sum::<f32>();
            world.barrier("step")?;
        }
        Ok::<_, Error>(sum)
    });
    assert_eq!(sums.unwrap(), [60.0, 60.0]);
}

#[test]
fn refuses_more_ranks_than_a_process_should_have() {
    let error = fail(LaunchConfig::new(20_000), |_| Ok(()));
    let message = error.to_string();
    assert!(
        message.starts_with("cannot launch 20000 ranks as threads of one process; request at most"),
        "{message}"
    );
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
fn a_stalled_rank_is_abandoned_even_if_its_peers_ignore_errors() {
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
        error.to_string().contains("waited 2s for ranks [1]"),
        "{error}"
    );
}

#[test]
fn handled_errors_do_not_fail_the_launch() {
    let seen = run(2, |world| {
        let label = if world.rank() == 0 { "a" } else { "b" };
        Ok(world.barrier(label).is_err())
    });
    assert_eq!(seen, [true, true]);
}

#[test]
fn worlds_are_independent() {
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
