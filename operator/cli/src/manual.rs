//! Manual pages, made of clap's definition of a command and of its page in [`crate::pages`].

use crate::pages::{Example, Group, PAGES, Page, members, page};
use clap::{Arg, ArgAction, Command};
use clap_mangen::{
    Man,
    roff::{Inline, Roff, bold, italic, roman},
};
use mercury_control::exit;
use std::io;

/// Section of the manual: system administration.
pub const SECTION: &str = "8";

/// Environment variables that belong to no option.
const ENVIRONMENT: [(&str, &str); 2] = [
    ("NO_COLOR", "If it is set and not empty, nothing is coloured. Only a terminal gets colours."),
    ("TERM", "If it is \"dumb\", nothing is coloured."),
];

/// Renders the page of `mercury` or of a command below it; `name` is the typed command, such as
/// `mercury hosted run`.
///
/// # Errors
///
/// Never, as long as memory suffices.
pub fn render(command: &Command, name: &str) -> io::Result<Vec<u8>> {
    let title = name.replace(' ', "-");
    let named = command.clone().name(title.clone()).bin_name(name);
    let man = Man::new(named).title(title.to_uppercase()).section(SECTION);
    let page = page(name.strip_prefix("mercury").unwrap_or(name).trim_start());
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    synopsis(command, name).to_writer(&mut text)?;
    man.render_description_section(&mut text)?;
    commands(command, name).to_writer(&mut text)?;
    man.render_options_section(&mut text)?;
    exit_status().to_writer(&mut text)?;
    environment(command).to_writer(&mut text)?;
    if let Some(page) = page {
        files(page).to_writer(&mut text)?;
        examples(page.examples).to_writer(&mut text)?;
    }
    see_also(command, name, page).to_writer(&mut text)?;
    man.render_version_section(&mut text)?;
    Ok(text)
}

/// Returns the options and arguments that the manual shows: all except the hidden ones, help and
/// version.
fn shown(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_builtin = |arg: &Arg| matches!(arg.get_action(), ArgAction::Help | ArgAction::Version);
    command.get_arguments().filter(move |arg| !arg.is_hide_set() && !is_builtin(arg))
}

fn synopsis(command: &Command, name: &str) -> Roff {
    let mut words = vec![bold(name)];
    let (positional, options): (Vec<_>, Vec<_>) = shown(command).partition(|arg| arg.is_positional());
    for arg in options.into_iter().chain(positional) {
        let [open, close] = if arg.is_required_set() { ["", ""] } else { ["[", "]"] };
        words.push(roman(format!(" {open}")));
        words.extend(form(arg));
        words.push(roman(close));
    }
    if command.has_subcommands() {
        words.extend([roman(" "), italic("command")]);
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]).text(words);
    roff
}

/// Formats an option with its value, or an argument, as it is typed.
fn form(arg: &Arg) -> Vec<Inline> {
    let range = arg.get_num_args().unwrap_or_default();
    let names = arg.get_value_names().unwrap_or_default();
    let more =
        if matches!(arg.get_action(), ArgAction::Append) || range.max_values() > 1 { " ..." } else { "" };
    let value = format!("{}{more}", names.join(" "));
    let Some(long) = arg.get_long() else {
        let dashes = if arg.is_last_set() { "-- " } else { "" };
        return vec![bold(dashes), italic(value)];
    };
    let option = bold(format!("--{long}"));
    match (arg.get_action().takes_values(), range.min_values()) {
        (false, _) => vec![option],
        (true, 0) => vec![option, roman("[="), italic(value), roman("]")],
        (true, _) => vec![option, roman(" "), italic(value)],
    }
}

/// Lists the commands below this one: by group below `mercury` itself.
fn commands(command: &Command, name: &str) -> Roff {
    let mut roff = Roff::new();
    let below: Vec<_> =
        command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help").collect();
    if below.is_empty() {
        return roff;
    }
    roff.control("SH", ["COMMANDS"]);
    let entry = |roff: &mut Roff, sub: &Command| {
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        roff.control("TP", []).text([bold(format!("{name} {}", sub.get_name()))]).text([roman(about)]);
    };
    if name != "mercury" {
        below.iter().for_each(|sub| entry(&mut roff, sub));
        return roff;
    }
    for group in Group::ALL {
        roff.control("SS", [group.heading()]);
        members(command, group)
            .iter()
            .filter(|sub| sub.get_name() != "help")
            .for_each(|sub| entry(&mut roff, sub));
    }
    roff
}

fn exit_status() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for line in exit::TABLE.lines().skip(1) {
        let (status, meaning) = line.trim_start().split_once(' ').unwrap_or((line, ""));
        roff.control("TP", ["6"]).text([bold(status)]).text([roman(meaning.trim_start())]);
    }
    roff
}

fn environment(command: &Command) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["ENVIRONMENT"]);
    let mut variable = |name: &str, text: &str| {
        roff.control("TP", []).text([bold(name)]).text([roman(text)]);
    };
    for arg in shown(command) {
        if let (Some(name), Some(long)) = (arg.get_env(), arg.get_long()) {
            variable(&name.to_string_lossy(), &format!("The same as --{long}, which takes precedence."));
        }
    }
    ENVIRONMENT.iter().for_each(|(name, text)| variable(name, text));
    roff
}

fn files(page: &Page) -> Roff {
    let mut roff = Roff::new();
    // Every command talks to the driver, except those of guests and of hosted machines.
    let is_other = ["hosted", "disco", "guests"].iter().any(|other| page.command.starts_with(other));
    let is_of_driver = !page.command.is_empty() && !is_other;
    let common = page_files("").filter(|file| is_of_driver && file.path == "/dev/mercury");
    let files: Vec<_> = page_files(page.command).chain(common).collect();
    if files.is_empty() {
        return roff;
    }
    roff.control("SH", ["FILES"]);
    for file in files {
        roff.control("TP", []).text([italic(file.path)]).text([roman(file.content)]);
    }
    roff
}

fn page_files(command: &str) -> impl Iterator<Item = &'static crate::pages::File> {
    page(command).into_iter().flat_map(|page| page.files)
}

fn examples(examples: &[Example]) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLES"]);
    for example in examples {
        roff.control("PP", []).text([roman(format!("{}:", example.purpose))]);
        roff.control("PP", []).control("RS", ["4"]).text([bold(example.line)]).control("RE", []);
    }
    roff
}

/// Lists the pages of the command above, of the commands below or of the same group, and of other
/// programs.
fn see_also(command: &Command, name: &str, page: Option<&Page>) -> Roff {
    let above = name.rsplit_once(' ').map(|(above, _)| above.replace(' ', "-"));
    let below = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let below = below.map(|sub| format!("{name} {}", sub.get_name()).replace(' ', "-"));
    let group = page.and_then(|page| page.group);
    let is_beside = |other: &&Page| {
        group.is_some() && other.group == group && page.is_some_and(|page| page.command != other.command)
    };
    let beside = PAGES.iter().filter(is_beside).map(|other| format!("mercury-{}", other.command));
    let own = above.into_iter().chain(below).chain(beside).map(|title| format!("{title}({SECTION})"));
    let others = page.into_iter().flat_map(|page| page.see_also).map(|other| (*other).to_owned());
    let mut words = Vec::new();
    for reference in own.chain(others) {
        let (title, section) = reference.split_at(reference.find('(').unwrap_or(reference.len()));
        let comma = if words.is_empty() { "" } else { ", " };
        words.extend([roman(comma), bold(title), roman(section)]);
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]).text(words);
    roff.control("PP", []).text([roman("The documents in /usr/share/doc/mercury/docs.")]);
    roff
}
