//! Ranks that are processes. Without the feature `mpi`: the error of a program that does not support them.

#[cfg(feature = "mpi")]
mod scenes;
#[cfg(feature = "mpi")]
#[path = "../skipped/mod.rs"]
mod skipped;

#[cfg(feature = "mpi")]
fn main() -> std::process::ExitCode {
    scenes::main()
}

#[cfg(not(feature = "mpi"))]
fn main() {
    use burn_fsdp_collectives::{Error, LaunchConfig, launch, launcher_ranks};
    use std::process::Command;

    const SIZE: &str = "OMPI_COMM_WORLD_SIZE";
    if std::env::var(SIZE).is_ok() {
        assert_eq!(launcher_ranks(), Some(2));
        let launched = launch(LaunchConfig::new(2), |_| Ok::<_, Error>(()));
        println!("{}", launched.expect_err("there is no MPI"));
        return;
    }
    // As `mpirun -n 2` would start it.
    let program = std::env::current_exe().expect("this program has a path");
    let mut started = Command::new(program);
    started.env(SIZE, "2").env("OMPI_COMM_WORLD_RANK", "1");
    let output = started.output().expect("this program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(
        text.contains("one of 2 processes started by Open MPI's mpirun"),
        "{text}"
    );
    assert!(text.contains("build it with the feature `mpi`"), "{text}");
    println!("test result: ok");
}
