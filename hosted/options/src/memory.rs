//! The option `--memory`: a number of mebibytes, or an amount with its unit.

/// The largest machine, in mebibytes.
const MOST: u64 = 1 << 20;

/// Reads an amount of memory, in mebibytes: `512`, `512M`, `4G`.
pub fn mebibytes(text: &str) -> Result<u64, String> {
    let amount = read(text).ok_or_else(|| {
        "an amount is a number of MiB, or has a unit: 512M, 4G, 1T (M is 1024 × 1024 bytes)".to_owned()
    })?;
    if (1..=MOST).contains(&amount) { Ok(amount) } else { Err("it has to be from 1M to 1T".to_owned()) }
}

fn read(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.strip_suffix("iB").or_else(|| unit.strip_suffix("ib")).unwrap_or(unit);
    let factor = match unit {
        "M" | "m" => 1,
        "G" | "g" => 1 << 10,
        "T" | "t" => 1 << 20,
        "" if end == text.len() => 1,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_and_without_units() {
        for (text, amount) in [("512", 512), ("512M", 512), ("512MiB", 512), ("4g", 4096), ("1T", 1 << 20)] {
            assert_eq!(mebibytes(text), Ok(amount), "{text}");
        }
        for text in ["", "M", "iB", "10X", "10iB", "10MB", "1.5G", "-1", "1 G", "99999999999999999999"] {
            assert!(mebibytes(text).is_err_and(|error| error.contains("512M, 4G")), "{text}");
        }
        for text in ["0", "2T"] {
            assert!(mebibytes(text).is_err_and(|error| error.contains("1M to 1T")), "{text}");
        }
    }
}
