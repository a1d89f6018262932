//! Draws a plan as SVG.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::floors::{Floors, Kind};
use crate::plan::{Plan, Spot};
use burn_fsdp_architecture::imports::Imports;

const BOX_HEIGHT: f64 = 34.0;
const FLOOR_HEIGHT: f64 = 96.0;
/// The space for the numbers of the floors.
const LEFT: f64 = 56.0;
const MARGIN: f64 = 24.0;
/// The space for the title and the legend.
const TOP: f64 = 84.0;
/// Maximum width of a letter of the font, at 12 pixels.
const LETTER: f64 = 7.3;

/// Draws the imports of a crate.
pub(crate) fn draw(name: &str, imports: &Imports) -> String {
    let circles = imports.circles();
    let floors = Floors::of(imports, &circles);
    let plan = Plan::of(&floors, |file| box_width(&imports.files[file]));
    let drawing = Drawing {
        imports,
        plan: &plan,
        round: circles.iter().flatten().copied().collect(),
    };
    let num = |kind| {
        floors
            .arrows
            .values()
            .filter(|other| **other == kind)
            .count()
    };
    let sizes: Vec<String> = circles
        .iter()
        .map(|circle| circle.len().to_string())
        .collect();
    let title = format!(
        "{name}: {} files, {} imports on {} floors, {}, {} back up",
        imports.files.len(),
        imports.arrows.len(),
        plan.rows.len(),
        if sizes.is_empty() {
            "no circle".to_owned()
        } else {
            format!("circles of {}", sizes.join(", "))
        },
        num(Kind::Up),
    );
    drawing.write(&title)
}

struct Drawing<'a> {
    imports: &'a Imports,
    plan: &'a Plan,
    /// Files in circles.
    round: BTreeSet<usize>,
}

impl Drawing<'_> {
    fn write(&self, title: &str) -> String {
        let boxes = self.plan.x.iter().map(|(spot, x)| match spot {
            Spot::File(file) => x + box_width(&self.imports.files[*file]) / 2.0,
            Spot::Bend { .. } => *x,
        });
        let right = boxes.fold(0.0, f64::max);
        let apart = self.apart();
        let width = (LEFT + right + 12.0 + MARGIN)
            .max(2.0 * MARGIN + title.len() as f64 * 9.8)
            .max(2.0 * MARGIN + 640.0);
        let bottom = self.y(0) + BOX_HEIGHT + 20.0;
        let height = bottom + MARGIN + 20.0 * apart.len() as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"36\" font-size=\"16\" font-weight=\"bold\">{title}</text>\n"
        );
        legend(&mut svg);
        self.floors(&mut svg, width);
        for kind in [Kind::Down, Kind::Circle, Kind::Up] {
            self.lines(&mut svg, kind);
        }
        self.boxes(&mut svg);
        for (at, line) in apart.iter().enumerate() {
            let y = bottom + 20.0 * (at as f64 + 0.8);
            let _ = writeln!(
                svg,
                "<text x=\"{MARGIN}\" y=\"{y:.0}\" font-size=\"12\" fill=\"#555\" xml:space=\"preserve\">{line}</text>"
            );
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Returns the files without any arrow, in lines.
    fn apart(&self) -> Vec<String> {
        let files = self.imports.files.iter().enumerate();
        let apart: Vec<&str> = files
            .filter(|(file, _)| !self.plan.x.contains_key(&Spot::File(*file)))
            .map(|(_, path)| path.as_str())
            .collect();
        let lines = apart.chunks(4).enumerate();
        lines
            .map(|(at, paths)| match at {
                0 => format!("without imports: {}", paths.join(", ")),
                _ => format!("                 {}", paths.join(", ")),
            })
            .collect()
    }

    fn floors(&self, svg: &mut String, width: f64) {
        for row in 0..self.plan.rows.len() {
            let y = self.y(row);
            let _ = writeln!(
                svg,
                "<rect x=\"{MARGIN}\" y=\"{:.0}\" width=\"{:.0}\" height=\"{:.0}\" fill=\"#f7f7f4\"/>\n\
                 <text x=\"{:.0}\" y=\"{:.0}\" font-size=\"12\" fill=\"#888\">{}</text>",
                y - 10.0,
                width - 2.0 * MARGIN,
                BOX_HEIGHT + 20.0,
                MARGIN + 6.0,
                y + BOX_HEIGHT / 2.0 + 4.0,
                row + 1,
            );
        }
    }

    fn lines(&self, svg: &mut String, kind: Kind) {
        let (colour, width) = match kind {
            Kind::Down => ("#b4b4ae", 1.0),
            Kind::Circle => ("#f0a49a", 1.2),
            Kind::Up => ("#c81e1e", 1.6),
        };
        let _ = writeln!(
            svg,
            "<g fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\">"
        );
        let mut ends = BTreeSet::new();
        let mut bends = BTreeSet::new();
        for (_, upper, lower) in self.plan.lines.iter().filter(|line| line.0 == kind) {
            let (x0, y0) = (self.port(kind, *upper), self.row_y(*upper) + BOX_HEIGHT);
            let (x1, y1) = (self.port(kind, *lower), self.row_y(*lower));
            let half = (y1 - y0) / 2.0;
            let _ = writeln!(
                svg,
                "<path d=\"M{x0:.0} {y0:.0}C{x0:.0} {:.0} {x1:.0} {:.0} {x1:.0} {y1:.0}\"/>",
                y0 + half,
                y1 - half,
            );
            let end = match kind {
                Kind::Up => *upper,
                Kind::Down | Kind::Circle => *lower,
            };
            if let Spot::File(_) = end {
                ends.insert(end);
            }
            bends.extend(
                [*upper, *lower]
                    .into_iter()
                    .filter(|spot| matches!(spot, Spot::Bend { .. })),
            );
        }
        for spot in bends {
            let (x, y) = (self.x(spot), self.row_y(spot));
            let _ = writeln!(svg, "<path d=\"M{x:.0} {y:.0}v{BOX_HEIGHT:.0}\"/>");
        }
        svg.push_str("</g>\n");
        for spot in ends {
            let (x, y) = (self.port(kind, spot), self.row_y(spot));
            let (tip, back) = match kind {
                Kind::Up => (y + BOX_HEIGHT, 7.0),
                Kind::Down | Kind::Circle => (y, -7.0),
            };
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.0} {tip:.0}l-4 {back}h8z\" fill=\"{colour}\"/>"
            );
        }
    }

    fn boxes(&self, svg: &mut String) {
        for spot in self.plan.x.keys() {
            let Spot::File(file) = spot else { continue };
            let path = &self.imports.files[*file];
            let (x, y, width) = (self.x(*spot), self.row_y(*spot), box_width(path));
            let (fill, stroke) = if self.round.contains(file) {
                ("#fdecea", "#c81e1e")
            } else {
                ("#ffffff", "#55554f")
            };
            let _ = writeln!(
                svg,
                "<rect x=\"{:.0}\" y=\"{y:.0}\" width=\"{width:.0}\" height=\"{BOX_HEIGHT:.0}\" rx=\"4\" \
                 fill=\"{fill}\" stroke=\"{stroke}\"/>",
                x - width / 2.0,
            );
            let (folder, name) = split(path);
            let mut line = |text: &str, y: f64, size: f64, colour: &str| {
                let _ = writeln!(
                    svg,
                    "<text x=\"{x:.0}\" y=\"{y:.0}\" font-size=\"{size}\" fill=\"{colour}\" \
                     text-anchor=\"middle\">{text}</text>"
                );
            };
            if folder.is_empty() {
                line(name, y + 21.0, 12.0, "#111")
            } else {
                line(folder, y + 13.0, 10.0, "#777");
                line(name, y + 27.0, 12.0, "#111");
            }
        }
    }

    /// Returns the position at which lines of a kind touch a spot. Lines back up are next to the others.
    fn port(&self, kind: Kind, spot: Spot) -> f64 {
        match (kind, spot) {
            (Kind::Up, Spot::File(_)) => self.x(spot) + 7.0,
            _ => self.x(spot),
        }
    }

    fn x(&self, spot: Spot) -> f64 {
        LEFT + self.plan.x[&spot]
    }

    fn row_y(&self, spot: Spot) -> f64 {
        let row = self.plan.rows.iter().position(|row| row.contains(&spot));
        self.y(row.unwrap_or_default())
    }

    fn y(&self, row: usize) -> f64 {
        TOP + FLOOR_HEIGHT * (self.plan.rows.len().saturating_sub(1) - row) as f64
    }
}

fn legend(svg: &mut String) {
    let entries = [
        ("#b4b4ae", "imports what stands below", 0.0),
        ("#f0a49a", "the same, inside a circle", 232.0),
        ("#c81e1e", "back up", 464.0),
    ];
    for (colour, text, at) in entries {
        let x = MARGIN + at;
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.0} 56h24\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{:.0}\" y=\"60\" font-size=\"12\" fill=\"#555\">{text}</text>",
            x + 30.0,
        );
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rfind('/')
        .map_or(("", path), |at| path.split_at(at + 1))
}

fn box_width(path: &str) -> f64 {
    let (folder, name) = split(path);
    (name.len() as f64 * LETTER).max(folder.len() as f64 * LETTER * 10.0 / 12.0) + 16.0
}
