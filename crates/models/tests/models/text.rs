use std::fs;

use burn_fsdp_models::{ByteText, ModelError, TokenStream};
use tempfile::TempDir;

const NO_LIMIT: usize = usize::MAX;

fn slice(stream: &TokenStream) -> &[u8] {
    match stream {
        TokenStream::Text(range) => range.as_bytes().expect("bytes"),
        other => panic!("text is bytes, not {other:?}"),
    }
}

#[test]
fn the_last_twentieth_is_held_out() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("text");
    let bytes: Vec<u8> = (0..200).collect();
    fs::write(&path, &bytes).unwrap();
    let text = ByteText::read(&path, NO_LIMIT).unwrap();
    assert_eq!(slice(&text.training()), &bytes[..190]);
    assert_eq!(slice(&text.held_out()), &bytes[190..]);
    assert_eq!(text.num_bytes(), 200);
}

#[test]
fn bytes_need_not_be_utf8() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("text");
    fs::write(&path, [0xff; 40]).unwrap();
    assert_eq!(ByteText::read(&path, NO_LIMIT).unwrap().num_bytes(), 40);
}

#[test]
fn a_folder_is_read_in_the_order_of_its_paths() {
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("b")).unwrap();
    for (name, text) in [("c", "333"), ("b/z", "22"), ("b/a", "1"), ("a", "0000")] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
    assert_eq!(slice(&text.training()), b"00001223");
    assert_eq!(slice(&text.held_out()), b"33");
    assert_eq!(text.num_files(), 4);
    assert_eq!(text.num_skipped(), 0);
}

#[test]
fn reading_stops_at_the_limit() {
    let folder = TempDir::new().unwrap();
    for name in ["a", "b", "c"] {
        fs::write(folder.path().join(name), name.repeat(10)).unwrap();
    }
    let text = ByteText::read(folder.path(), 15).unwrap();
    assert_eq!(text.num_bytes(), 15);
    assert_eq!(text.num_files(), 2);
    assert_eq!(slice(&text.training()), b"aaaaaaaaaabbb");
}

#[test]
fn a_missing_path_is_an_error() {
    let folder = TempDir::new().unwrap();
    let error = ByteText::read(folder.path().join("nothing"), NO_LIMIT).unwrap_err();
    assert!(matches!(error, ModelError::File { .. }), "{error}");
    assert!(error.to_string().contains("nothing"), "{error}");
}

#[test]
fn an_empty_file_and_an_empty_folder_are_errors() {
    let folder = TempDir::new().unwrap();
    let error = ByteText::read(folder.path(), NO_LIMIT).unwrap_err();
    assert!(
        matches!(error, ModelError::TooLittleText { found: 0, .. }),
        "{error}"
    );
    let path = folder.path().join("empty");
    fs::write(&path, "").unwrap();
    let error = ByteText::read(&path, NO_LIMIT).unwrap_err();
    assert!(
        matches!(error, ModelError::TooLittleText { found: 0, .. }),
        "{error}"
    );
}

#[test]
fn the_shortest_text_has_a_target_on_both_sides() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("short");
    fs::write(&path, "abc").unwrap();
    assert!(ByteText::read(&path, NO_LIMIT).is_err());
    fs::write(&path, "abcd").unwrap();
    let text = ByteText::read(&path, NO_LIMIT).unwrap();
    assert_eq!(slice(&text.training()), b"ab");
    assert_eq!(slice(&text.held_out()), b"cd");
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn links_in_a_folder_are_not_followed() {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("text"), "some text").unwrap();
        symlink(folder.path(), folder.path().join("loop")).unwrap();
        let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
        assert_eq!(text.num_bytes(), 9);
    }

    #[test]
    fn a_link_given_directly_is_followed() {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("text"), "some text").unwrap();
        let link = folder.path().join("link");
        symlink(folder.path().join("text"), &link).unwrap();
        assert_eq!(ByteText::read(&link, NO_LIMIT).unwrap().num_bytes(), 9);
    }

    #[test]
    fn a_socket_is_not_text() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = ByteText::read(&path, NO_LIMIT).unwrap_err();
        assert!(matches!(error, ModelError::NotText { .. }), "{error}");
    }
}

#[test]
fn the_sources_of_burn_are_the_same_everywhere() {
    let text = ByteText::crate_sources().unwrap();
    // Of the versions that this crate is built with; with others, this changes.
    assert_eq!(
        (text.num_bytes(), text.num_files(), text.num_held_out()),
        (5_767_902, 440, 22)
    );
    let (training, held_out) = (text.training(), text.held_out());
    let (training, held_out) = (slice(&training), slice(&held_out));
    assert!(held_out.len() > text.num_bytes() / 50 && held_out.len() < text.num_bytes() / 10);
    // No file is on both sides.
    let first_lines = &held_out[..2000];
    assert!(
        !training
            .windows(first_lines.len())
            .any(|window| window == first_lines)
    );
}
