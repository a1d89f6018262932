//! The contract of engines, and the outcomes of failures, on ranks that are processes.
//!
//! This program starts itself again under `mpirun`, once for each number of processes and each kind of failure. If
//! there is no `mpirun`, it only prints a notice.

#[path = "../launcher/mod.rs"]
mod launcher;

use std::hint::black_box;
use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::time::{Duration, Instant};

use burn_fsdp_collectives::{
    Check, ElementType, Error, Fault, FullPart, LaunchConfig, Part, Partition, ProcessGroup,
    Reduction, Source, launch, launcher_ranks,
};

/// Ranks that do not arrive within this time are given up.
const DEADLINE: Duration = Duration::from_secs(5);

pub(crate) fn main() -> ExitCode {
    match launcher::scene() {
        Some(scene) => play(&scene),
        None => direct(),
    }
}

/// Starts the scenes and checks their outcomes.
fn direct() -> ExitCode {
    if launcher::mpirun(1).is_none() {
        return ExitCode::SUCCESS;
    }
    let contracts = ["contract", "contract by bytes"];
    for (processes, scene) in [1, 2, 3, 4]
        .into_iter()
        .flat_map(|n| contracts.map(|scene| (n, scene)))
    {
        let output = mpirun(processes, scene);
        expect(
            &output,
            Some(0),
            &[&format!("{processes} ranks keep the contract")],
        );
    }
    for (scene, kind) in [
        ("flip in a gather", "all_gather"),
        ("flip in a sum of shards", "reduce_scatter"),
        ("flip in a sum", "all_reduce"),
    ] {
        let output = mpirun(3, scene);
        let words = [
            "in step 7, ",
            "received different bytes",
            "for tensor 0 of ",
            "than rank 1 passed to the call",
            kind,
        ];
        expect(&output, Some(3), &words);
    }
    overlap();
    let output = mpirun(2, "fewer");
    expect(&output, Some(3), &["7 ranks were requested", "2 processes"]);
    let output = mpirun(3, "error");
    expect(&output, Some(3), &["rank 1 failed: told to fail"]);
    let output = mpirun(3, "panic");
    expect(
        &output,
        Some(3),
        &["rank 1 failed: panicked: told to panic"],
    );
    let output = mpirun(3, "leave");
    expect(
        &output,
        Some(3),
        &["rank 1 returned without starting barrier \"x\""],
    );
    let output = mpirun(3, "mismatch");
    expect(&output, Some(3), &["rank 1 called barrier \"odd\""]);
    let output = mpirun(3, "late");
    expect(&output, Some(3), &["for ranks [1] to start barrier \"x\""]);
    // The launcher's message about a process that it had to kill is not checked.
    let output = mpirun(3, "stop");
    expect(&output, None, &["for ranks [1] to start barrier \"x\""]);
    assert!(!output.status.success(), "{output:?}");
    let output = mpirun(3, "kill");
    expect(&output, None, &[]);
    assert!(!output.status.success(), "{output:?}");
    println!("test result: ok");
    ExitCode::SUCCESS
}

/// The name of the scene in which a rank computes while its bytes travel, before the path of a file.
const OVERLAP: &str = "overlap by ";

/// Shows that bytes go to and from a rank that computes.
fn overlap() {
    let file = format!("burn-fsdp-overlap-{}", std::process::id());
    let file = std::env::temp_dir().join(file);
    let scene = format!("{OVERLAP}{}", file.display());
    let output = mpirun(2, &scene);
    let _ = std::fs::remove_file(&file);
    expect(&output, Some(0), &["all has come while rank 0 computed"]);
}

fn mpirun(processes: usize, scene: &str) -> Output {
    println!("{scene} on {processes} processes");
    let mut mpirun = launcher::this_program(processes, scene).expect("mpirun is there");
    mpirun.output().expect("mpirun runs")
}

fn expect(output: &Output, code: Option<i32>, lines: &[&str]) {
    let [stdout, stderr] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let text = format!("{stdout}{stderr}");
    // MPICH's launcher kills the other processes when the first one fails, and returns the code of any of them.
    let is_of_any = std::env::var_os("BURN_FSDP_MPIRUN").is_some_and(|path| path == "mpirun.mpich");
    match code {
        Some(3) if is_of_any => assert!(!output.status.success(), "{text}"),
        Some(_) => assert_eq!(output.status.code(), code, "{text}"),
        None => {}
    }
    for line in lines {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
}

/// Runs one process's part in a scene.
fn play(scene: &str) -> ExitCode {
    let size = launcher_ranks().expect("mpirun has started this process");
    let ranks = if scene == "fewer" { 7 } else { size };
    let config = LaunchConfig::new(ranks).deadline(match scene {
        "late" | "stop" => DEADLINE,
        _ => Duration::from_secs(60),
    });
    let config = if scene.starts_with("flip") || scene == "contract by bytes" {
        config.check(Check::Agreement)
    } else {
        config
    };
    let name = scene.to_owned();
    let result = launch(config, move |world| act(&name, &world));
    match result {
        Ok(results) => {
            assert_eq!(results.len(), 1);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn act(scene: &str, world: &ProcessGroup) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if scene.starts_with("contract") {
        return Ok(keep_contract(world)?);
    }
    if scene.starts_with("flip") {
        return Ok(flip(scene, world)?);
    }
    if let Some(file) = scene.strip_prefix(OVERLAP) {
        return Ok(compute_meanwhile(world, file.as_ref())?);
    }
    world.barrier("begin")?;
    if world.rank() == 1 {
        match scene {
            "error" => return Err("told to fail".into()),
            "panic" => std::panic::resume_unwind(Box::new("told to panic")),
            "leave" => return Ok(()),
            "mismatch" => world.barrier("odd")?,
            "late" => std::thread::sleep(Duration::from_secs(600)),
            "stop" => signal("-STOP"),
            "kill" => signal("-KILL"),
            _ => {}
        }
    }
    world.barrier("x")?;
    Ok(())
}

/// Runs an operation in which a bit of rank 1's data flips.
fn flip(scene: &str, world: &ProcessGroup) -> Result<(), Error> {
    world.set_fault(Fault::parse("rank:1,step:7,at:collective,how:flip")?);
    world.begin_step(7);
    let (len, size) = (64, world.size());
    let partition = Partition::flat(len, size)?;
    let bytes = |len: usize| Source::new(vec![world.rank() as u8; len]);
    let full = || vec![Part::new(bytes(len), partition, ElementType::U8)];
    let own = partition.len(world.rank());
    let (sum, take) = (Reduction::sum(), |len| vec![world.pool().take(len)]);
    match scene {
        "flip in a gather" => {
            let shard = Part::new(bytes(own), partition, ElementType::U8);
            world.all_gather("it", vec![], vec![shard], take(len))?;
        }
        "flip in a sum of shards" => {
            world.reduce_scatter("it", vec![], sum, full(), take(own))?;
        }
        _ => {
            let part = FullPart::new(bytes(len), ElementType::U8);
            world.all_reduce("it", vec![], sum, vec![part], take(len))?;
        }
    }
    world.barrier("not before the flip is found")
}

/// Rank 0 starts a gather and computes. It waits when rank 1 has told it, by a file, that it has what rank 0 gave, and
/// that rank 0 has what it gave: so bytes have arrived and gone while rank 0 did not wait.
fn compute_meanwhile(world: &ProcessGroup, file: &Path) -> Result<(), Error> {
    let shard = 4 << 20;
    let partition = Partition::flat(shard * world.size(), world.size())?;
    let source = Source::new(vec![world.rank() as u8; shard]);
    let part = Part::new(source, partition, ElementType::U8);
    let into = vec![world.pool().take(shard * world.size())];
    let pending = world.start_all_gather("meanwhile", vec![], vec![part], into)?;
    let received = if world.rank() == 0 {
        let deadline = Instant::now() + Duration::from_secs(50);
        let mut sum = 0_u64;
        while !file.exists() {
            assert!(Instant::now() < deadline, "nothing travels without a wait");
            sum = black_box((0..10_000_u64).fold(sum, u64::wrapping_add));
        }
        println!("all has come while rank 0 computed");
        pending.wait()?
    } else {
        let received = pending.wait_released()?;
        std::fs::write(file, "").expect("a temporary file is written");
        received
    };
    for (rank, bytes) in received.buffers[0].as_ref().chunks(shard).enumerate() {
        assert!(bytes.iter().all(|byte| usize::from(*byte) == rank));
    }
    world.barrier("end")
}

fn signal(signal: &str) {
    let process = std::process::id().to_string();
    let killed = Command::new("kill").args([signal, &process]).status();
    killed.expect("there is a kill");
    std::thread::sleep(Duration::from_secs(600));
}

fn keep_contract(world: &ProcessGroup) -> Result<(), Error> {
    assert_eq!(world.engine(), "mpi");
    for (name, case) in burn_fsdp_engine_tests::CASES {
        let before = world.counts();
        case(world)?;
        if world.rank() == 0 {
            println!("  {name}: {}", world.counts().since(&before));
        }
    }
    // Again, on a part of the world.
    let part = world.split(world.rank() % 2, 0, "part")?;
    for (_, case) in burn_fsdp_engine_tests::CASES {
        case(&part)?;
    }
    world.barrier("end")?;
    if world.rank() == 0 {
        println!("{} ranks keep the contract", world.size());
    }
    Ok(())
}
