//! Text for people, JSON for programs, colour only where a person looks.

use serde::Serialize;
use std::io::IsTerminal;

/// Width to which prose is wrapped, in columns.
const WIDTH: usize = 100;

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// A result that people can read.
pub trait Render {
    /// Writes it.
    fn render(&self, to: &mut Text);
}

/// A meaning that a colour stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Green.
    Good,
    /// Yellow.
    Doubtful,
    /// Red.
    Bad,
    /// Dim.
    Quiet,
    /// Bold.
    Strong,
}

/// Text under construction.
#[derive(Clone, Debug, Default)]
pub struct Text {
    lines: String,
    colour: bool,
}

impl Text {
    /// Text with colours or without.
    #[must_use]
    pub fn new(colour: bool) -> Self {
        Self { lines: String::new(), colour }
    }

    /// Adds a line.
    pub fn line(&mut self, line: impl AsRef<str>) {
        self.lines += line.as_ref().trim_end();
        self.lines.push('\n');
    }

    /// Adds prose after a heading, wrapped and indented beneath its own start.
    pub fn wrapped(&mut self, heading: &str, prose: &str) {
        let indent = " ".repeat(heading.chars().count());
        let mut line = heading.to_string();
        for word in prose.split_whitespace() {
            if line.chars().count() + 1 + word.chars().count() > WIDTH {
                self.line(&line);
                line.clone_from(&indent);
            }
            if !line.ends_with(' ') && !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        self.line(line);
    }

    /// Adds a table: columns as wide as their widest cell, numbers to the right.
    pub fn table(&mut self, rows: &[Vec<String>]) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let width = |column| rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in rows {
            let cells =
                widths.iter().enumerate().map(|(column, width)| aligned(&cell(row, column), *width, column));
            self.line(cells.collect::<Vec<_>>().join("  "));
        }
    }

    /// `text` in the colour of its meaning.
    #[must_use]
    pub fn tone(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => "32",
            Tone::Doubtful => "33",
            Tone::Bad => "31",
            Tone::Quiet => "2",
            Tone::Strong => "1",
        };
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// What was written.
    #[must_use]
    pub fn finish(self) -> String {
        self.lines
    }
}

fn aligned(cell: &str, width: usize, column: usize) -> String {
    let numeric = cell.starts_with(|c: char| c.is_ascii_digit() || c == '–') && column > 0;
    let padding = " ".repeat(width - cell.chars().count());
    if numeric { padding + cell } else { cell.to_string() + &padding }
}

/// The object around every JSON result.
#[derive(Serialize)]
struct Envelope<'a, T: Serialize> {
    /// Version of the shape: raised when a field changes its meaning or goes.
    format: u32,
    command: &'a str,
    #[serde(flatten)]
    result: &'a T,
}

/// A result as JSON text.
#[must_use]
pub fn json<T: Serialize>(command: &str, result: &T) -> String {
    let envelope = Envelope { format: 1, command, result };
    serde_json::to_string_pretty(&envelope).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

/// A result in the wanted format.
#[must_use]
pub fn text<T: Serialize + Render>(format: Format, command: &str, result: &T) -> String {
    match format {
        Format::Json => json(command, result) + "\n",
        Format::Text => {
            let mut text = Text::new(colour());
            result.render(&mut text);
            text.finish()
        }
    }
}

/// Whether standard output is looked at by a person who has not asked for plain text.
#[must_use]
pub fn colour() -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stdout().is_terminal() && !plain && !dumb
}

/// A number with its thousands apart: 1,234,567.
#[must_use]
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// TSC ticks in microseconds.
#[must_use]
pub fn ticks_to_us(ticks: u64, tsc_khz: u64) -> f64 {
    if tsc_khz == 0 { 0.0 } else { ticks as f64 * 1000.0 / tsc_khz as f64 }
}

/// Microseconds with three significant digits, in the unit that fits.
#[must_use]
pub fn duration(us: f64) -> String {
    match us {
        us if us >= 999_500.0 => format!("{} s", significant(us / 1e6)),
        us if us >= 999.5 => format!("{} ms", significant(us / 1e3)),
        us if us >= 0.9995 || us == 0.0 => format!("{} µs", significant(us)),
        us => format!("{} ns", significant(us * 1e3)),
    }
}

fn significant(value: f64) -> String {
    match value {
        value if value >= 99.95 || value == 0.0 => format!("{value:.0}"),
        value if value >= 9.995 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// Bytes in the binary unit that fits.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", significant(bytes as f64 / 1024.0)),
        _ => format!("{} MiB", significant(bytes as f64 / 1_048_576.0)),
    }
}

/// A 64-bit quantity that is an address or a register: JSON numbers end at 2^53.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hex(pub u64);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{:#x}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(duration(0.0), "0 µs");
        assert_eq!(duration(0.25), "250 ns");
        assert_eq!(duration(2.5), "2.50 µs");
        assert_eq!(duration(220.0), "220 µs");
        assert_eq!(duration(1234.0), "1.23 ms");
        assert_eq!(duration(60e6), "60.0 s");
        assert_eq!(bytes(3 << 20), "3.00 MiB");
        assert_eq!(ticks_to_us(3000, 3_000_000), 1.0);
        assert_eq!(ticks_to_us(3000, 0), 0.0);
    }

    #[test]
    fn tables_align() {
        let mut text = Text::new(false);
        text.table(&[vec!["cpu".into(), "ticks".into()], vec!["0".into(), "12".into()]]);
        assert_eq!(text.finish(), "cpu  ticks\n0       12\n");
    }

    #[test]
    fn prose_wraps_beneath_itself() {
        let mut text = Text::new(false);
        text.wrapped("Why: ", &"word ".repeat(30));
        let text = text.finish();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        assert!(text.lines().skip(1).all(|line| line.starts_with("     word")));
    }

    #[test]
    fn colour_only_when_asked() {
        assert_eq!(Text::new(false).tone(Tone::Bad, "x"), "x");
        assert_eq!(Text::new(true).tone(Tone::Bad, "x"), "\x1b[31mx\x1b[0m");
    }
}
