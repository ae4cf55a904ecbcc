"""What a run tells: metrics, tables for the terminal, a one-file HTML page, and figures for a paper.

Nothing here changes a result. Plotly and Matplotlib are loaded only when a page or a figure is asked for.
"""
