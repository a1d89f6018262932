//! A resumed run says where it is not the run that was saved.

use crate::command::Folder;

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps";

#[test]
fn settings_that_differ_are_named() {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 4"));
    folder.report(&format!("{RUN} --steps 4 --resume --save-init init"));
    folder.write(
        "text",
        "to be or not to be, that is the question. ".repeat(100),
    );
    for (change, sentence) in [
        ("--seed 2", "--seed is 2, but was 1 when step 4 was saved"),
        ("--lr 0.5", "--lr is 0.5, but was 0.01"),
        ("--beta1 0.8", "--beta1 is 0.8"),
        ("--beta2 0.9", "--beta2 is 0.9"),
        ("--eps 0.5", "--eps is 0.5"),
        ("--weight-decay 0.5", "--weight-decay is 0.5, but was 0.01"),
        (
            "--lr-schedule cosine",
            "--lr-schedule is cosine, but was constant",
        ),
        ("--lr-warmup 3", "--lr-warmup is 3, but was 0"),
        ("--batch 24", "--batch is 24, but was 12"),
        (
            "--batch 24",
            "goes on with sample 96 of the data, but step 4 was saved after sample 48",
        ),
        ("--precision bf16", "--precision is bf16, but was f32"),
        (
            "--clip-grad-norm 1",
            "--clip-grad-norm is 1.0, but was none",
        ),
        ("--init init", "--init has no effect"),
    ] {
        let run = folder.train(&format!("{RUN} --steps 4 --resume {change}"));
        assert_eq!(run.code, 0, "{change}: {}", run.stderr);
        assert!(
            run.stderr.contains(&sentence.to_string()),
            "{change}: {}",
            run.stderr
        );
    }
    let text = "--data text --warmup 0 --checkpoint-dir steps --sample 0";
    let run = folder.train(&format!("{text} --steps 4 --resume"));
    assert!(
        run.stderr.contains("was synthetic tokens"),
        "{}",
        run.stderr
    );
    // Longer, on other ranks, divided in another way: nothing that the numbers depend on.
    let report = folder.report(&format!(
        "{RUN} --steps 6 --resume --ranks 3 --strategy no-shard --save-every 1"
    ));
    let warnings = report["warnings"].to_string();
    assert!(!warnings.contains("was saved"), "{warnings}");
    let report = folder.report(&format!("{RUN} --steps 8 --resume --seed 3"));
    assert!(
        report["warnings"].to_string().contains("--seed is 3"),
        "{report}"
    );
}
