//! Output: text for people, JSON for programs, and colour only on a terminal.

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use anstyle::{AnsiColor, Style};
use serde::Serialize;
use std::{
    io::{IsTerminal, stdout},
    os::fd::AsFd,
};

/// Columns of prose where there is no terminal, and at most on one.
pub const WIDTH_MAX: usize = 100;

/// Columns of prose at least: a narrower terminal breaks lines by itself.
const WIDTH_MIN: usize = 40;

/// The format of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
}

/// A result that people can read.
pub trait Render {
    fn render(&self, to: &mut Text);
}

/// A meaning that a colour stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Good,
    Doubtful,
    Bad,
    Quiet,
    Strong,
}

impl Tone {
    /// Returns the colour on a terminal.
    #[must_use]
    pub fn style(self) -> Style {
        match self {
            Self::Good => AnsiColor::Green.on_default(),
            Self::Doubtful => AnsiColor::Yellow.on_default(),
            Self::Bad => AnsiColor::Red.on_default(),
            Self::Quiet => Style::new().dimmed(),
            Self::Strong => Style::new().bold(),
        }
    }
}

/// Text under construction.
#[derive(Clone, Debug, Default)]
pub struct Text {
    lines: String,
    colour: bool,
    /// Columns of the terminal, if the text goes to one.
    terminal: Option<usize>,
}

impl Text {
    /// Makes an empty text with colours or without.
    #[must_use]
    pub fn new(colour: bool) -> Self {
        Self { lines: String::new(), colour, terminal: None }
    }

    /// Makes an empty text for `stream`: with colours if the stream shows them, and as wide as its
    /// terminal.
    pub fn to(stream: &(impl RawStream + AsFd)) -> Self {
        Self { terminal: terminal_width(stream), ..Self::new(takes_colour(stream)) }
    }

    /// Adds a line. Breaks it between words if the terminal is narrower.
    pub fn line(&mut self, line: impl AsRef<str>) {
        for line in line.as_ref().trim_end().split('\n') {
            let indent = line.len() - line.trim_start().len();
            self.fill(&line[..indent], &" ".repeat(indent + 2), &line[indent..], self.terminal);
        }
    }

    /// Adds prose after a heading, wrapped and indented beneath its own start.
    pub fn wrapped(&mut self, heading: &str, prose: &str) {
        let prose = prose.split_whitespace().collect::<Vec<_>>().join(" ");
        self.beneath(heading, &prose, Some(self.terminal.unwrap_or(WIDTH_MAX)));
    }

    /// Adds prose after a heading. Breaks it only if the terminal is narrower, so that scripts find
    /// each heading's text in one line.
    pub fn after(&mut self, heading: &str, prose: &str) {
        self.beneath(heading, prose, self.terminal);
    }

    fn beneath(&mut self, heading: &str, prose: &str, width: Option<usize>) {
        let gap = if heading.is_empty() || heading.ends_with(' ') { "" } else { " " };
        let indent = " ".repeat(textwrap::core::display_width(heading));
        self.fill(&format!("{heading}{gap}"), &indent, prose, width);
    }

    fn fill(&mut self, first: &str, others: &str, prose: &str, width: Option<usize>) {
        let options = |width| {
            textwrap::Options::new(width)
                .initial_indent(first)
                .subsequent_indent(others)
                .break_words(false)
                .word_splitter(textwrap::WordSplitter::NoHyphenation)
        };
        match width {
            Some(width)
                if textwrap::core::display_width(first) + textwrap::core::display_width(prose) > width =>
            {
                self.lines += textwrap::fill(prose, options(width)).trim_end();
            }
            _ => self.lines += format!("{first}{prose}").trim_end(),
        }
        self.lines.push('\n');
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
            // A row is never broken, because a broken row is unreadable.
            self.lines += cells.collect::<Vec<_>>().join("  ").trim_end();
            self.lines.push('\n');
        }
    }

    /// Returns `text` in the colour of its meaning.
    #[must_use]
    pub fn tone(&self, tone: Tone, text: &str) -> String {
        if !self.colour {
            return text.to_string();
        }
        let style = tone.style();
        format!("{style}{text}{style:#}")
    }

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
    /// Version of the shape, raised when a field changes its meaning or goes.
    format: u32,
    command: &'a str,
    #[serde(flatten)]
    result: &'a T,
}

/// Formats a result as JSON text.
#[must_use]
pub fn json<T: Serialize>(command: &str, result: &T) -> String {
    let envelope = Envelope { format: 1, command, result };
    serde_json::to_string_pretty(&envelope).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

/// Formats a result as text or JSON.
#[must_use]
pub fn text<T: Serialize + Render>(format: Format, command: &str, result: &T) -> String {
    match format {
        Format::Json => json(command, result) + "\n",
        Format::Text => {
            let mut text = Text::to(&stdout());
            result.render(&mut text);
            text.finish()
        }
    }
}

/// Returns true if `stream` shows colours: it is a terminal, and neither `NO_COLOR` nor `TERM=dumb` forbids
/// them.
fn takes_colour(stream: &impl RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}

/// Returns the columns of prose on the terminal of `stream`, if it is one. A serial console reports
/// no size, so `COLUMNS` sets it.
pub fn terminal_width(stream: &impl AsFd) -> Option<usize> {
    if !stream.as_fd().is_terminal() {
        return None;
    }
    let size = terminal_size::terminal_size_of(stream).map(|(width, _)| usize::from(width.0));
    let told = || std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    Some(size.or_else(told).unwrap_or(WIDTH_MAX).clamp(WIDTH_MIN, WIDTH_MAX))
}

/// Formats a number with commas between thousands: 1,234,567.
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

/// Converts TSC ticks to microseconds.
#[must_use]
pub fn ticks_to_us(ticks: u64, tsc_khz: u64) -> f64 {
    if tsc_khz == 0 { 0.0 } else { ticks as f64 * 1000.0 / tsc_khz as f64 }
}

/// Formats microseconds with three significant digits, in the unit that fits.
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

/// Formats bytes in the binary unit that fits.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", significant(bytes as f64 / 1024.0)),
        _ => format!("{} MiB", significant(bytes as f64 / 1_048_576.0)),
    }
}

/// An address or a register: formatted as a string, because JSON numbers are exact only up to 2^53.
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
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH_MAX));
        assert!(text.lines().skip(1).all(|line| line.starts_with("     word")));
    }

    #[test]
    fn lines_break_between_words_on_a_narrow_terminal_alone() {
        let long = format!("  → {}end", "word ".repeat(30));
        let mut text = Text::new(true);
        text.line(&long);
        assert_eq!(text.finish(), format!("{long}\n"));
        let mut text = Text { terminal: Some(60), ..Text::new(true) };
        let heading = text.tone(Tone::Bad, "refused  ");
        text.line(&long);
        text.after(&heading, &"word ".repeat(30));
        text.table(&[vec!["cell".repeat(30)]]);
        let text = text.finish();
        let (prose, row) = text.trim_end().rsplit_once('\n').expect("lines");
        assert!(prose.lines().all(|line| textwrap::core::display_width(line) <= 60), "{prose}");
        assert!(prose.lines().skip(1).any(|line| line.starts_with("    word")), "{prose}");
        assert!(prose.lines().any(|line| line.starts_with("         word")), "{prose}");
        assert_eq!(row.len(), 120);
    }

    #[test]
    fn a_file_is_no_terminal() {
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert_eq!(terminal_width(&file), None);
        assert!(!takes_colour(&file));
    }

    #[test]
    fn colour_only_when_asked() {
        assert_eq!(Text::new(false).tone(Tone::Bad, "x"), "x");
        assert_eq!(Text::new(true).tone(Tone::Bad, "x"), "\x1b[31mx\x1b[0m");
    }
}
