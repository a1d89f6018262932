use std::fs;

use burn_fsdp_models::{ByteText, ModelError, Remark, TokenStream};
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
    assert_eq!(text.remarks().iter().count(), 0);
    assert_eq!(text.unread(), None);
}

/// Returns the remarks on a text with their counts.
fn remarks(text: &ByteText) -> Vec<(Remark, usize)> {
    let remarks = text.remarks().iter();
    remarks.map(|(remark, count, _)| (remark, count)).collect()
}

#[test]
fn non_text_files_are_skipped_and_counted() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    write(".git/config", b"hidden");
    write(".notes", b"hidden, too");
    write("CVS/Entries", b"of a version control");
    write("bare.git/HEAD", b"ref: refs/heads/main");
    write("bare.git/objects/info/packs", b"P pack");
    write("bare.git/refs/heads/main", b"0123");
    write("HEAD", b"is a file here.");
    write("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR");
    write("weights.safetensors", b"\x40\0\0\0\0\0\0\0{}");
    write("archive.gz", b"\x1f\x8b\x08");
    write("text", b"some text, and more of it");
    let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
    let all = [slice(&text.training()), slice(&text.held_out())].concat();
    assert_eq!(all, b"is a file here.some text, and more of it");
    let of = [(Remark::Hidden, 4), (Remark::Binary, 3)];
    assert_eq!(remarks(&text), of);
    assert_eq!(text.remarks().to_string(), "; left out: 4 hidden, 3 binary");
    // If no text is left, the error reports what was skipped.
    fs::remove_file(folder.path().join("text")).unwrap();
    fs::remove_file(folder.path().join("HEAD")).unwrap();
    let error = ByteText::read(folder.path(), NO_LIMIT).unwrap_err();
    assert!(error.to_string().contains("4 hidden, 3 binary"), "{error}");
    // A path that is named itself is read, whatever it is.
    let text = ByteText::read(folder.path().join("picture.png"), NO_LIMIT).unwrap();
    assert_eq!(text.num_bytes(), 16);
    assert_eq!(remarks(&text), [(Remark::NamedBinary, 1)]);
    let text = ByteText::read(folder.path().join(".git"), NO_LIMIT).unwrap();
    assert_eq!((text.num_bytes(), remarks(&text)), (6, Vec::new()));
}

#[test]
fn marked_encodings_are_converted_to_utf8() {
    let folder = TempDir::new().unwrap();
    let lines = "née là-bas 🦀\n".repeat(20);
    let utf16 = lines.encode_utf16();
    let little: Vec<u8> = utf16.clone().flat_map(u16::to_le_bytes).collect();
    let big: Vec<u8> = utf16.flat_map(u16::to_be_bytes).collect();
    for (bytes, remark) in [
        (lines.clone().into_bytes(), None),
        (
            [&b"\xef\xbb\xbf"[..], lines.as_bytes()].concat(),
            Some(Remark::Marked),
        ),
        ([&b"\xff\xfe"[..], &little].concat(), Some(Remark::Decoded)),
        ([&b"\xfe\xff"[..], &big].concat(), Some(Remark::Decoded)),
    ] {
        fs::write(folder.path().join("text"), &bytes).unwrap();
        for path in [folder.path().to_owned(), folder.path().join("text")] {
            let text = ByteText::read(&path, NO_LIMIT).unwrap();
            let all = [slice(&text.training()), slice(&text.held_out())].concat();
            assert_eq!(all, lines.as_bytes());
            let want: Vec<_> = remark.into_iter().map(|remark| (remark, 1)).collect();
            assert_eq!(remarks(&text), want);
            // With a limit, as many bytes are read as of the text in UTF-8.
            let text = ByteText::read(&path, 101).unwrap();
            let all = [slice(&text.training()), slice(&text.held_out())].concat();
            assert_eq!(all, &lines.as_bytes()[..101]);
            assert!(text.unread().is_some_and(|unread| unread.bytes > 0));
        }
    }
    fs::write(folder.path().join("text"), b"caf\xe9 na\xefve\n").unwrap();
    let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
    assert_eq!(
        (text.num_bytes(), remarks(&text)),
        (11, vec![(Remark::NotUtf8, 1)])
    );
}

#[test]
fn paths_named_by_the_caller_are_skipped() {
    let folder = TempDir::new().unwrap();
    for name in ["run/step-1/index.json", "loss.svg", "text"] {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name.repeat(3)).unwrap();
    }
    let root = folder.path().canonicalize().unwrap();
    let own = [root.join("run"), root.join("loss.svg")];
    let is_own = |path: &std::path::Path| own.iter().any(|own| own == path);
    let text = ByteText::read_without(folder.path(), NO_LIMIT, &is_own).unwrap();
    assert_eq!(
        (text.num_bytes(), remarks(&text)),
        (12, vec![(Remark::Excluded, 2)])
    );
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
    let unread = text.unread().expect("there is more");
    assert_eq!((unread.bytes, unread.is_all), (15, true));
    assert_eq!(unread.from, folder.path().join("b"));
    // The limit equals the length of the text.
    let text = ByteText::read(folder.path(), 30).unwrap();
    assert_eq!((text.num_bytes(), text.unread()), (30, None));
    let text = ByteText::read(folder.path().join("a"), 4).unwrap();
    assert_eq!(text.unread().map(|unread| unread.bytes), Some(6));
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
    fn links_are_followed_and_each_file_is_read_once() {
        let (folder, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let inside = |name: &str| folder.path().join(name);
        fs::create_dir(inside("sub")).unwrap();
        fs::write(inside("sub/text"), "some text").unwrap();
        fs::write(inside(".blob"), "of a blob").unwrap();
        fs::create_dir(other.path().join("more")).unwrap();
        fs::write(other.path().join("more/text"), "elsewhere").unwrap();
        // Hidden files, and files elsewhere.
        symlink(inside(".blob"), inside("a-blob")).unwrap();
        symlink(other.path().join("more"), inside("b-folder")).unwrap();
        // Links back to their own folders, to each other, and to nothing.
        symlink(folder.path(), inside("sub/loop")).unwrap();
        symlink("/", inside("sub/root")).unwrap();
        symlink(folder.path(), other.path().join("more/back")).unwrap();
        symlink(inside("sub"), inside("twice")).unwrap();
        symlink(inside("y"), inside("x")).unwrap();
        symlink(inside("x"), inside("y")).unwrap();
        symlink("nothing", inside("z")).unwrap();
        let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
        let all = [slice(&text.training()), slice(&text.held_out())].concat();
        assert_eq!(
            String::from_utf8(all).unwrap(),
            "of a blobelsewheresome text"
        );
        let want = [
            (Remark::Hidden, 1),
            (Remark::Again, 4),
            (Remark::BrokenLink, 3),
        ];
        assert_eq!(remarks(&text), want);
        // Nothing changes if the folder itself is named by a link.
        let link = other.path().join("link");
        symlink(folder.path(), &link).unwrap();
        let again = ByteText::read(&link, NO_LIMIT).unwrap();
        assert_eq!(again.parts(), text.parts());
        assert_eq!(remarks(&again), want);
    }

    #[test]
    fn unreadable_and_special_files_are_counted() {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("text"), "some text").unwrap();
        let _listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        // It can be opened, but reading it fails for every user.
        #[cfg(target_os = "linux")]
        symlink("/proc/self/mem", folder.path().join("mem")).unwrap();
        let text = ByteText::read(folder.path(), NO_LIMIT).unwrap();
        assert_eq!(text.num_bytes(), 9);
        assert_eq!(text.remarks().count(Remark::Special), 1);
        #[cfg(target_os = "linux")]
        assert_eq!(text.remarks().count(Remark::Unreadable), 1);
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
    // The versions with which this crate is built. Other versions give other numbers.
    assert_eq!(
        (text.num_bytes(), text.num_files(), text.num_held_out()),
        (5_767_902, 440, 22)
    );
    let (training, held_out) = (text.training(), text.held_out());
    let (training, held_out) = (slice(&training), slice(&held_out));
    assert!(held_out.len() > text.num_bytes() / 50 && held_out.len() < text.num_bytes() / 10);
    // No file is in both parts.
    let first_lines = &held_out[..2000];
    assert!(
        !training
            .windows(first_lines.len())
            .any(|window| window == first_lines)
    );
}
