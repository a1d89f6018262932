//! Completions and manual pages.

use crate::command::Folder;

#[test]
fn shells_complete_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = Folder::new().run(&format!("completions {shell}"));
        assert_eq!(run.code, 0, "{}", run.stderr);
        for word in ["consolidate", "memory-budget", "certify"] {
            assert!(run.stdout.contains(word), "{shell} does not know {word}");
        }
    }
    assert_eq!(Folder::new().run("completions csh").code, 2);
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let all = Folder::new().run("manual");
    assert_eq!(all.code, 0, "{}", all.stderr);
    assert!(all.stdout.contains("consolidate") && !all.stdout.contains("encoder"));
    let train = Folder::new().run("manual train");
    assert!(train.stdout.contains(".SH OPTIONS") && train.stdout.contains("certify"));
    let wrong = Folder::new().run("manual tran");
    assert_eq!(wrong.code, 2);
    assert!(
        wrong.stderr.contains("no command `tran`"),
        "{}",
        wrong.stderr
    );
}
