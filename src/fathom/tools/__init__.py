"""Tools that a model may call: functions that the caller passes, and nothing else."""

from fathom.tools.loop import Step, Trace, answer_with_tools
from fathom.tools.tool import Tool, ToolError, as_tools, load_tools

__all__ = ["Step", "Tool", "ToolError", "Trace", "answer_with_tools", "as_tools", "load_tools"]
