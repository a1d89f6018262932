//! Parses human-readable memory sizes.

const UNITS: [(&str, u64); 8] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Parses a number with a unit, such as `80GiB` or `40 GB`, into bytes. A number without a unit is in bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    let found = UNITS.iter().find_map(|(name, bytes)| {
        let number = lower.strip_suffix(&name.to_ascii_lowercase())?;
        Some((number.trim(), *bytes))
    });
    let (number, unit) = found.unwrap_or((lower.as_str(), 1));
    let value: f64 = number
        .parse()
        .map_err(|_| "it must be a number with a unit, such as 80GiB or 40GB".to_owned())?;
    let bytes = value * unit as f64;
    if !(1.0..=1e18).contains(&bytes) {
        return Err("it must be at least 1 byte and at most 1e18 bytes".to_owned());
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn binary_and_decimal_units_are_parsed() {
        assert_eq!(parse("80GiB"), Ok(80 << 30));
        assert_eq!(parse("40 gb"), Ok(40_000_000_000));
        assert_eq!(parse("1.5MiB"), Ok(3 << 19));
        assert_eq!(parse("4096"), Ok(4096));
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        for text in [
            "",
            "GiB",
            "many",
            "-1GiB",
            "0",
            "NaN",
            "inf",
            "1e300GiB",
            "80 GiB GiB",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
