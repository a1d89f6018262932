//! Event files, read by a decoder that shares no code with the encoder.

mod decoder;

use burn_fsdp_runs::{EVENT_FILE_PREFIX, EventFile, StepLine};

use decoder::{Event, What, events, files, scalars};

fn line(step: u64, loss: f64) -> StepLine {
    let text = format!("{{\"step\":{step},\"loss\":0}}");
    let line: StepLine = serde_json::from_str(&text).expect("a line");
    StepLine { loss, ..line }
}

#[test]
fn a_file_starts_with_its_version_and_its_first_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().join("new/logs");
    let mut file = EventFile::create(&logs, 300).expect("it is created");
    let full = StepLine {
        tokens_per_s: Some(3000.0),
        step_ms: Some(12.5),
        lr: Some(2e-3),
        eval_loss: Some(2.5),
        grad_norm: Some(f64::INFINITY),
        ranks: Some(4),
        flops_per_s: Some(1e12),
        rss_bytes: Some(1 << 30),
        unsharded_bytes: Some(1 << 20),
        ..line(300, 3.25)
    };
    file.write(&full).expect("it is written");
    file.write(&line(1 << 40, f64::NAN)).expect("it is written");
    file.sync().expect("it is synced");
    let name = file.path().file_name().expect("a name").to_string_lossy();
    assert!(name.starts_with(EVENT_FILE_PREFIX), "{name}");

    let events = events(&std::fs::read(file.path()).expect("it is read"));
    let [version, start, first, second] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(version.what, What::Version("brain.Event:2".to_owned()));
    assert_eq!((&start.what, start.step), (&What::Start, 300));
    let values = [
        ("loss/train", 3.25),
        ("loss/held_out", 2.5),
        ("optimizer/lr", 2e-3),
        ("optimizer/grad_norm", f32::INFINITY),
        ("speed/tokens_per_s", 3000.0),
        ("speed/tokens_per_s_per_rank", 750.0),
        ("speed/step_ms", 12.5),
        ("speed/flops_per_s", 1e12),
        ("memory/rss_bytes", 1_073_741_824.0),
        ("memory/unsharded_bytes", 1_048_576.0),
    ];
    let values = values.map(|(tag, value)| (tag.to_owned(), value));
    assert_eq!(first.what, What::Scalars(values.to_vec()));
    assert_eq!(first.step, 300);
    let Event {
        step,
        what: What::Scalars(values),
        wall_time,
    } = second
    else {
        panic!("{second:?}")
    };
    assert_eq!(*step, 1 << 40);
    assert!(matches!(&values[..], [(tag, loss)] if tag == "loss/train" && loss.is_nan()));
    let second_of_name = name[EVENT_FILE_PREFIX.len()..].split('.').next();
    let second_of_name: f64 = second_of_name.and_then(|s| s.parse().ok()).expect("a time");
    assert!((0.0..60.0).contains(&(wall_time - second_of_name)));
}

/// Also within one second, in which names would otherwise be the same.
#[test]
fn a_later_run_has_a_later_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut created = Vec::new();
    for (first_step, loss) in [(0, 1.0), (2, 2.0), (1, 3.0)] {
        let mut file = EventFile::create(folder.path(), first_step).expect("it is created");
        for step in first_step..first_step + 3 {
            file.write(&line(step, loss)).expect("it is written");
        }
        created.push(file.path().to_owned());
    }
    assert_eq!(files(folder.path()), created);
    let losses = &scalars(folder.path())["loss/train"];
    let losses: Vec<(u64, f32)> = losses.iter().map(|(step, loss)| (*step, *loss)).collect();
    assert_eq!(losses, [(0, 1.0), (1, 3.0), (2, 3.0), (3, 3.0)]);
}

#[test]
fn names_of_other_programs_do_not_stop_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in [
        "99999999999999999999999.host",
        "18446744073709551615.host",
        "9999999999.host",
        "x",
        "4000000000.host.1.v2",
    ] {
        let path = folder.path().join(format!("{EVENT_FILE_PREFIX}{name}"));
        std::fs::write(path, "").expect("a file");
    }
    let file = EventFile::create(folder.path(), 0).expect("it is created");
    let name = file.path().file_name().expect("a name").to_string_lossy();
    assert_eq!(name, format!("{EVENT_FILE_PREFIX}4000000001.burn-fsdp"));
    std::fs::write(folder.path().join("file"), "").expect("a file");
    assert!(EventFile::create(&folder.path().join("file"), 0).is_err());
}
