//! Tables for the pages in `docs/` that commands write. They read well on a terminal too.

/// Returns a table with the first column aligned left and the others right.
#[must_use]
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|&cell| cell.to_owned()).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&header]).filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(3)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let rule = widths.iter().enumerate().map(|(column, &width)| match column {
        0 => "-".repeat(width),
        _ => "-".repeat(width - 1) + ":",
    });
    let mut text = line(&header, &widths) + &line(&rule.collect::<Vec<_>>(), &widths);
    text.extend(rows.iter().map(|row| line(row, &widths)));
    text
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let padded = cells.iter().zip(widths).enumerate().map(|(column, (cell, &width))| match column {
        0 => format!("| {cell:<width$} "),
        _ => format!("| {cell:>width$} "),
    });
    padded.collect::<String>() + "|\n"
}

/// Returns a number with its thousands set apart.
#[must_use]
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let groups = digits.as_bytes()[first..].chunks(3).map(String::from_utf8_lossy);
    let head = (first > 0).then(|| digits[..first].into());
    head.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// Replaces the section of a page that has this heading, or appends the section.
#[must_use]
pub fn replace_section(page: &str, heading: &str, section: &str) -> String {
    let Some(at) = page.find(&format!("{heading}\n")) else {
        return format!("{}\n\n{section}", page.trim_end());
    };
    let rest = &page[at + heading.len()..];
    let rest = rest.find("\n## ").map_or("", |next| &rest[next..]);
    format!("{}{}\n{}", &page[..at], section.trim_end(), rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["fork".to_owned(), "1.00".to_owned()], vec!["µs".to_owned(), "12,000".to_owned()]];
        let expected = "\
| what |  ratio |
| ---- | -----: |
| fork |   1.00 |
| µs   | 12,000 |
";
        assert_eq!(table(&["what", "ratio"], &rows), expected);
    }

    #[test]
    fn thousands_are_apart() {
        assert_eq!(
            [0, 999, 1000, 12_345, 1_234_567].map(thousands),
            ["0", "999", "1,000", "12,345", "1,234,567"]
        );
    }
}
