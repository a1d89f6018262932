//! `generate`: flags that limit the choice of tokens, and texts that end it.

use crate::command::Folder;

/// Trains a small model on text, so that its answers have letters.
fn trained() -> Folder {
    let folder = Folder::new();
    folder.write(
        "text.txt",
        "the cat sat on the mat and the dog sat on the cat. ".repeat(60),
    );
    folder.report(
        "--data text.txt --steps 60 --warmup 0 --sample 0 --seq 16 --lr 0.02 --checkpoint-dir run",
    );
    folder
}

fn generated(folder: &Folder, flags: &[&str]) -> String {
    let mut command = folder.command("generate run --prompt the --tokens 40");
    let output = command.args(flags).output().expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flags:?}: {stderr}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn flags_limit_the_choice_of_tokens() {
    let folder = trained();
    let greedy = generated(&folder, &["--temperature", "0"]);
    assert_ne!(generated(&folder, &["--temperature", "1.5"]), greedy);
    for flags in [["--top-k", "1"], ["--top-p", "0.0001"]] {
        for ranks in ["1", "3"] {
            let flags = [
                &flags[..],
                &["--temperature", "1.5", "--seed", "7", "--ranks", ranks],
            ];
            assert_eq!(generated(&folder, &flags.concat()), greedy, "{flags:?}");
        }
    }
    let varied = ["--temperature", "0", "--repetition-penalty", "3"];
    let varied = generated(&folder, &varied);
    let letters = |text: &str| {
        text.chars()
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    assert!(letters(&varied) > letters(&greedy), "{varied} and {greedy}");
}

#[test]
fn the_text_ends_before_a_stop() {
    let folder = trained();
    let whole = generated(&folder, &["--temperature", "0"]);
    let stop = whole.get(9..12).expect("letters").to_owned();
    let place = 3 + whole[3..].find(&stop).expect("a part of the text");
    for ranks in ["1", "2"] {
        let flags = [
            "--temperature",
            "0",
            "--stop",
            &stop,
            "--stop",
            "xyz",
            "--ranks",
            ranks,
        ];
        assert_eq!(
            generated(&folder, &flags).trim_end_matches('\n'),
            &whole[..place]
        );
    }
    // The prompt does not end the text.
    let flags = ["--temperature", "0", "--stop", "xyz"];
    assert_eq!(generated(&folder, &flags), whole);
    for (flags, word) in [
        (["--stop", ""], "--stop"),
        (["--top-k", "0"], "--top-k"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.5"], "--top-p"),
        (["--repetition-penalty", "-1"], "--repetition-penalty"),
    ] {
        let mut command = folder.command("generate run --prompt the");
        let output = command.args(flags).output().expect("the command starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {stderr}");
        assert!(stderr.contains(word), "{stderr}");
    }
}
