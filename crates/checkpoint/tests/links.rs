//! Links are not followed, and foreign files are not touched.
#![cfg(unix)]

mod common;

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::symlink;
use std::path::Path;

use burn_fsdp_checkpoint::storage::{FileSystem, Storage};
use burn_fsdp_checkpoint::{
    Check, Checkpoints, ConsolidationConfig, Error, Existing, PlainTensor, Staging,
    consolidate_to_file, consolidate_to_folder,
};
use common::Kind;

/// Returns a folder with valuable contents, and a folder of steps next to it.
fn next_to_valuable_files() -> (tempfile::TempDir, Checkpoints) {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(dir.path().join("docs/sub")).expect("makes");
    fs::write(dir.path().join("docs/thesis.txt"), "important").expect("writes");
    fs::write(dir.path().join("docs/sub/y"), "x").expect("writes");
    fs::create_dir(dir.path().join("run")).expect("makes");
    let checkpoints = Checkpoints::new(dir.path().join("run"));
    (dir, checkpoints)
}

fn assert_untouched(dir: &Path) {
    let thesis = fs::read_to_string(dir.join("docs/thesis.txt"));
    assert_eq!(thesis.expect("still there"), "important");
    assert!(dir.join("docs/sub/y").exists());
}

fn names(folder: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(folder).expect("lists");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("reads").file_name())
        .collect();
    names.sort();
    names
}

fn save(checkpoints: &Checkpoints, step: u64, existing: Existing) -> Result<(), Error> {
    let plan = common::plan(&common::line(2), Kind::Flat);
    let mut request = common::request(&plan, step);
    request.existing = existing;
    request.keep_last = NonZeroUsize::new(1);
    let saved = common::save_all(checkpoints, &request);
    saved.into_iter().next().expect("rank 0").map(drop)
}

#[test]
fn a_link_named_like_a_step_is_neither_replaced_nor_skipped() {
    let (dir, checkpoints) = next_to_valuable_files();
    let link = checkpoints.path(5);
    symlink("../docs", &link).expect("links");
    for existing in [Existing::Refuse, Existing::Replace] {
        save(&checkpoints, 5, existing).expect_err("a link is there");
    }
    assert_untouched(dir.path());
    assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    let names = names(&dir.path().join("run"));
    assert_eq!(names.len(), 2, "the link and the lock: {names:?}");

    save(&checkpoints, 4, Existing::Refuse).expect("saves");
    let newest = checkpoints.newest().expect_err("a newer one is a link");
    let good = checkpoints.newest_good(Check::Sizes).expect_err("so too");
    let listed = checkpoints.steps().expect_err("the last would be older");
    let opened = checkpoints.open(5).expect_err("a link");
    let kept = checkpoints
        .keep_last(NonZeroUsize::MIN, 5)
        .expect_err("a link");
    for error in [newest, good, listed, opened, kept] {
        assert!(
            matches!(&error, Error::NotAFolder { path, .. } if *path == link),
            "{error}"
        );
        assert!(error.to_string().contains("is a link"), "{error}");
    }
    save(&checkpoints, 6, Existing::Refuse).expect("saves");
    assert_eq!(
        checkpoints.steps().expect("lists"),
        [6],
        "the link is not counted"
    );
    assert_untouched(dir.path());
    assert!(matches!(checkpoints.clear(), Err(Error::NotAFolder { .. })));
    assert_eq!(checkpoints.steps().expect("lists"), [6]);
}

#[test]
fn a_folder_with_other_files_is_not_removed() {
    let (_dir, checkpoints) = next_to_valuable_files();
    let notes = checkpoints.path(5).join("notes");
    fs::create_dir_all(&notes).expect("makes");
    fs::write(notes.join("n.txt"), "mine").expect("writes");
    let error = save(&checkpoints, 5, Existing::Replace).expect_err("no step is there");
    assert!(
        matches!(&error, Error::Foreign { name, .. } if name == "notes"),
        "{error}"
    );
    // A whole step with a note in it is not removed either.
    save(&checkpoints, 6, Existing::Refuse).expect("saves");
    fs::write(checkpoints.path(6).join("note.txt"), "the best one").expect("writes");
    save(&checkpoints, 7, Existing::Refuse).expect("saves");
    save(&checkpoints, 8, Existing::Refuse).expect("saves");
    assert_eq!(checkpoints.steps().expect("lists"), [5, 6, 8]);
    assert!(matches!(checkpoints.clear(), Err(Error::Foreign { .. })));
    assert_eq!(
        checkpoints.steps().expect("lists"),
        [5, 6, 8],
        "all or nothing"
    );
    assert!(notes.join("n.txt").exists());
}

#[test]
fn a_damaged_step_is_replaced() {
    let (_dir, checkpoints) = next_to_valuable_files();
    for step in [1, 2] {
        save(&checkpoints, step, Existing::Refuse).expect("saves");
    }
    fs::remove_file(checkpoints.path(2).join("index.json")).expect("removes");
    save(&checkpoints, 2, Existing::Replace).expect("replaces");
    checkpoints.open(2).expect("whole again");
    save(&checkpoints, 3, Existing::Refuse).expect("saves");
    assert_eq!(checkpoints.clear().expect("removes"), [3]);
    assert!(!checkpoints.is_begun().expect("lists"));
}

#[test]
fn removing_a_tree_does_not_follow_links() {
    let (dir, _) = next_to_valuable_files();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).expect("makes");
    symlink("../docs", tree.join("link")).expect("links");
    // A name that is not text.
    let odd: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"\xff\xfe");
    fs::write(tree.join(odd), "").expect("writes");
    FileSystem.remove_tree(&tree).expect("removes");
    assert!(!tree.exists());
    let link = dir.path().join("link");
    symlink("docs", &link).expect("links");
    FileSystem.remove_tree(&link).expect("removes the link");
    assert!(!fs::exists(&link).expect("looks"));
    assert_untouched(dir.path());
    let missing = FileSystem.remove_tree(&link).expect_err("gone");
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn a_lock_that_is_not_a_file_is_an_immediate_error() {
    let (dir, checkpoints) = next_to_valuable_files();
    let lock = dir.path().join("run/.lock");
    symlink("../elsewhere", &lock).expect("links");
    let error = Staging::create(&checkpoints, 1, Existing::Refuse).expect_err("a link");
    assert!(error.to_string().contains("not a regular file"), "{error}");
    assert!(
        !dir.path().join("elsewhere").exists(),
        "nothing was made through the link"
    );
    fs::remove_file(&lock).expect("removes");
    let made = std::process::Command::new("mkfifo").arg(&lock).status();
    if made.is_ok_and(|status| status.success()) {
        let error = checkpoints.acquire().expect_err("a pipe");
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
}

/// Its steps would be read instead of the step that contains them.
#[test]
fn steps_cannot_be_saved_inside_a_step() {
    let (dir, checkpoints) = next_to_valuable_files();
    save(&checkpoints, 1, Existing::Refuse).expect("saves");
    let step = checkpoints.newest().expect("opens");
    let before = names(step.path());
    symlink("run/step-000001", dir.path().join("indirect")).expect("links");
    for root in [
        step.path().to_owned(),
        step.path().join("more/steps"),
        dir.path().join("indirect"),
    ] {
        let inside = Checkpoints::new(&root);
        let saved = save(&inside, 2, Existing::Refuse);
        let listed = inside.steps().map(drop);
        let newest = inside.newest().map(drop);
        for result in [saved, listed, newest, inside.acquire().map(drop)] {
            let error = result.expect_err("a step");
            assert!(
                matches!(error, Error::NotForSteps { .. }),
                "{}: {error}",
                root.display()
            );
        }
        assert_eq!(names(step.path()), before);
    }
}

#[test]
fn nothing_is_consolidated_into_a_step() {
    let (dir, checkpoints) = next_to_valuable_files();
    save(&checkpoints, 1, Existing::Refuse).expect("saves");
    fs::rename(checkpoints.path(1), dir.path().join("copy")).expect("renames");
    save(&checkpoints, 2, Existing::Refuse).expect("saves");
    let step = checkpoints.newest().expect("opens");
    let config = ConsolidationConfig {
        replace: true,
        ..ConsolidationConfig::default()
    };
    let indirect = dir.path().join("indirect");
    symlink("run/step-000002", &indirect).expect("links");
    let inside = step.path().to_owned();
    for out in [
        inside.join("rank-00001.safetensors"),
        inside.join("index.json"),
        inside.join("new"),
        inside.join("new/sub/file"),
        inside.join("../step-000002/model"),
        indirect.join("model"),
        dir.path().join("copy/model"),
        dir.path().join("run/step-000003"),
    ] {
        let error = consolidate_to_file(&step, &out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        })
        .expect_err("inside");
        assert!(
            matches!(error, Error::InsideStep { .. }),
            "{}: {error}",
            out.display()
        );
        let error = consolidate_to_folder(&step, &out, &config, |tensor| {
            Some(PlainTensor::unchanged(tensor))
        })
        .expect_err("inside");
        assert!(
            matches!(error, Error::InsideStep { .. }),
            "{}: {error}",
            out.display()
        );
    }
    step.verify(|_| ()).expect("untouched");
    // The remains of a killed consolidation are removed by the next one.
    let left = dir
        .path()
        .join("run/.model.safetensors.partial-0123456789abcdef");
    fs::write(&left, "half").expect("writes");
    let beside = dir.path().join("run/model.safetensors");
    consolidate_to_file(&step, &beside, &config, |tensor| {
        Some(PlainTensor::unchanged(tensor))
    })
    .expect("beside steps is fine");
    assert!(!left.exists());
}
