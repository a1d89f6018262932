//! Errors as `main` prints them, which is with `{:?}`.

use burn_fsdp::internals::collectives::LaunchError;
use burn_fsdp::{Error, LaunchConfig, launch};

#[test]
fn main_prints_what_to_do() {
    let nothing = |_| Ok::<_, Error>(());
    let no_ranks = launch(LaunchConfig::new(0), nothing).expect_err("there are no ranks");
    let failing = |_| Err::<(), _>(Error::UntrackedInTraining);
    let failed = launch(LaunchConfig::new(2), failing).expect_err("each rank fails");
    for (error, words) in [(no_ranks, "request at least one"), (failed, "autodiff()")] {
        let message = error.to_string();
        assert!(message.contains(words), "{message}");
        assert_eq!(format!("{error:?}"), message);
        assert_eq!(format!("{:?}", Error::from(error)), message);
    }
}

/// The error of a rank is still found by its type.
#[test]
fn causes_are_found_by_type() {
    let failing = |_| Err::<(), _>(Error::UntrackedInTraining);
    let failed = launch(LaunchConfig::new(1), failing).expect_err("the rank fails");
    let LaunchError::Failed { source, .. } = failed else {
        panic!("{failed}");
    };
    assert!(matches!(
        source.downcast_ref::<Error>(),
        Some(Error::UntrackedInTraining)
    ));
}
